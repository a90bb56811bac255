"""find_optional: what a store offers beyond the contract, and what its wrappers let through."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreError, StoreTimeout, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.store import optional
from pdstore.store.circuit_breaker import CircuitBreaker
from pdstore.store.find import find_optional
from pdstore.store.instrumented import Instrumented
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import ChecksumReader, ErrorCodes, FindsKeys, PutsAtOnce, SealingWriter
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import empty_slots, fresh_keys

PROTOCOLS = [value for value in vars(optional).values() if getattr(value, "_is_protocol", False)]
PROTOCOLS.remove(optional.Protocol)


class Offering(MemoryStore):
    """Offers everything, and keeps the calls."""

    fails = 0
    error: type[StoreError] = StoreUnavailable

    def __init__(self):
        super().__init__()
        self.calls = []

    def get_with_checksums(self, keys, slots, checksums):
        self._called("get_with_checksums")
        checksums[:] = range(1, len(keys) + 1)
        return len(keys)

    def get_right(self, keys, slots, starts, engine):
        self._called("get_right")
        return len(keys)

    def put_sealed(self, keys, slots, starts, engine):
        self._called("put_sealed")
        return len(keys)

    def which_stored(self, keys):
        self._called("which_stored")
        return [True] * len(keys)

    def put_at_once(self, key, value):
        self._called("put_at_once")
        return True

    def is_absent(self, key):
        return True

    def codes(self):
        return {"LOST": 3}

    def wait_for_change(self, seen, timeout_s):
        return 7

    def why_too_long(self, num_bytes):
        return None

    hears_all = True

    def keys_since(self, seen):
        return ["k"]

    def _called(self, name):
        self.calls.append(name)
        if self.fails:
            self.fails -= 1
            raise self.error(name)


def wrapped(store, metrics=None):
    """Wraps a store as an engine does."""
    return CircuitBreaker(Instrumented(store, metrics or Metrics()), failures=2)


@pytest.fixture
def store():
    return Offering()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_is_found_through_the_wrappers_of_an_engine(store, protocol):
    assert find_optional(store, protocol) is store
    found = find_optional(wrapped(store), protocol)
    assert isinstance(found, protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_store_without_it_gets_none_from_wrappers(protocol):
    plain = MinimalStore()
    assert find_optional(plain, protocol) is None
    assert find_optional(wrapped(plain), protocol) is None


class MinimalStore(WrapperStore):
    def __init__(self):
        super().__init__(MemoryStore())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_wrapper_says_by_isinstance_what_its_store_cannot_do(protocol):
    assert not isinstance(wrapped(MinimalStore()), protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wrapper_that_may_change_answers_offers_nothing(store, protocol):
    assert find_optional(WrapperStore(store), protocol) is None
    assert find_optional(wrapped(WrapperStore(store)), protocol) is None


def test_a_wrapper_lets_through_what_it_says(store):
    class Passing(WrapperStore):
        passes = (FindsKeys,)

    assert find_optional(Passing(store), FindsKeys) is store
    assert find_optional(Passing(store), ErrorCodes) is None
    finder = find_optional(wrapped(Passing(store)), FindsKeys)
    assert finder.which_stored(fresh_keys(2)) == [True, True]


def test_calls_are_counted_as_the_verb_that_they_are_a_form_of(store):
    metrics = Metrics()
    keys, slots = fresh_keys(2), empty_slots([64, 64])
    outer, sums = wrapped(store, metrics), [0, 0]
    assert find_optional(outer, ChecksumReader).get_with_checksums(keys, slots, sums) == 2
    assert sums == [1, 2]
    assert find_optional(outer, SealingWriter).put_sealed(keys[:1], slots, b"", None) == 1
    assert find_optional(outer, FindsKeys).which_stored(keys) == [True, True]
    assert find_optional(outer, ErrorCodes).codes() == {"LOST": 3}
    value = metrics.registry.get_sample_value
    for verb in ("get", "put", "match"):
        labels = {"verb": verb, "outcome": "ok"}
        assert value("pdstore_store_calls_total", labels) == 1, verb
    assert value("pdstore_bytes_total", {"direction": "load"}) == 128
    assert value("pdstore_bytes_total", {"direction": "save"}) == 64
    assert find_optional(outer, PutsAtOnce).put_at_once(keys[0], b"x")
    assert value("pdstore_store_calls_total", {"verb": "put", "outcome": "ok"}) == 2


def test_the_breaker_retries_them_and_keeps_them_from_a_store_that_fails(store):
    keys, outer = fresh_keys(1), wrapped(store)
    reader = find_optional(outer, FindsKeys)
    store.fails = 1
    assert reader.which_stored(keys) == [True]
    assert store.calls == ["which_stored"] * 2
    store.fails, store.error = 2, StoreTimeout
    for _ in range(2):
        with pytest.raises(StoreTimeout):
            reader.which_stored(keys)
    assert outer.is_open
    with pytest.raises(StoreUnavailable, match="in a row"):
        reader.which_stored(keys)
    assert len(store.calls) == 4
