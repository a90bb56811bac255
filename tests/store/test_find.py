"""Store.optional: what a store offers beyond the contract, and what its wrappers let through."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreError, StoreTimeout, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys, RenewsUnread
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import empty_slots, fresh_keys
from tests.support.kv import eventually


class Offering(MemoryStore):
    """Offers some protocols, and keeps the calls."""

    fails = 0
    hangs = False
    error: type[StoreError] = StoreUnavailable

    def __init__(self):
        super().__init__()
        self.calls = []

    def renew(self, keys, first, since):
        return len(keys)

    def which_stored(self, keys):
        self.calls.append("which_stored")
        if self.fails:
            self.fails -= 1
            raise self.error("away")
        return [True] * len(keys)

    def match(self, keys):
        if self.hangs:
            raise StoreTimeout("slow")
        return super().match(keys)

    def codes(self):
        return {"LOST": 3}


def wrapped(store, metrics=None):
    """Wraps a store as an engine does."""
    return GuardedStore(store, metrics or Metrics(), failures=2)


@pytest.fixture
def store():
    return Offering()


@pytest.mark.parametrize("protocol", [FindsKeys, MemoryStore])
def test_a_protocol_is_found_through_wrappers_that_change_no_answer_and_no_others(store, protocol):
    assert store.optional(protocol) is store
    assert wrapped(store).optional(protocol) is not None
    assert WrapperStore(store).optional(protocol) is None
    assert wrapped(WrapperStore(store)).optional(protocol) is None


def test_calls_are_counted_as_the_verb_that_they_are_a_form_of(store):
    metrics = Metrics()
    keys, slots = fresh_keys(2), empty_slots([64, 64])
    outer = wrapped(store, metrics)
    assert outer.put(keys, slots) == 2
    assert outer.optional(RenewsUnread).renew(keys, 0, 0.0) == 2
    assert outer.optional(FindsKeys).which_stored(keys) == [True, True]
    assert outer.codes() == {"LOST": 3}
    value = metrics.registry.get_sample_value
    for verb, count in (("put", 1), ("match", 2)):
        labels = {"verb": verb, "outcome": "ok"}
        assert value("pdstore_store_calls_total", labels) == count, verb
    assert value("pdstore_bytes_total", {"direction": "save"}) == 128


def test_the_breaker_retries_them_and_keeps_them_from_a_store_that_fails(store):
    keys, outer = fresh_keys(1), wrapped(store)
    reader = outer.optional(FindsKeys)
    store.fails = 1
    assert reader.which_stored(keys) == [True]
    assert store.calls == ["which_stored"] * 2
    store.fails, store.error, store.hangs = 1, StoreTimeout, True
    with pytest.raises(StoreTimeout):
        reader.which_stored(keys)
    assert outer.is_open
    with pytest.raises(StoreUnavailable, match="is tried every"):
        reader.which_stored(keys)
    assert len(store.calls) == 3
    store.hangs = False
    eventually(lambda: not outer.is_open)
    assert reader.which_stored(keys) == [True]
