"""GuardedStore: calls are counted, tried once more, and kept from a store that fails."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreFull, StoreTimeout, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics
from pdstore.native.arena import Filled
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.wrappers import GuardedStore, WrapperStore, problem_of
from tests.support.clock import Clock
from tests.support.kv import settings_of
from tests.support.scripted_store import Scripted

KEYS = [BlockKey("a")]


@pytest.fixture
def clock():
    return Clock()


def failing(store):
    with pytest.raises((StoreUnavailable, StoreTimeout)):
        store.match(KEYS)


def test_a_broken_connection_is_tried_once_more():
    inner = Scripted(StoreUnavailable("stale"), 1)
    assert GuardedStore(inner, Metrics()).match(KEYS) == 1
    assert inner.num_calls == 2


def test_the_breaker_opens_after_failures_in_a_row_and_then_does_not_call(clock):
    inner = Scripted(*[StoreTimeout("slow")] * 3)
    store = GuardedStore(inner, Metrics(), failures=3, clock=clock)
    for _ in range(3):
        assert not store.is_open
        failing(store)
    assert store.is_open
    with pytest.raises(StoreUnavailable, match="3 times in a row; it is tried every 1 s"):
        store.match(KEYS)
    assert inner.num_calls == 3


def test_one_call_is_let_through_after_each_pause(clock):
    inner = Scripted(*[StoreTimeout("slow")] * 20)
    store = GuardedStore(inner, Metrics(), failures=3, open_s=2.0, clock=clock)
    for _ in range(3):
        failing(store)
    for calls in (3, 4):
        clock.now += 1.99
        failing(store)
        assert inner.num_calls == calls
        clock.now += 0.02
        failing(store)
        assert inner.num_calls == calls + 1


def test_only_one_caller_probes(clock):
    store = None

    class Probing(Scripted):
        def match(self, keys):
            if store.is_open:
                with pytest.raises(StoreUnavailable, match="in a row"):
                    store.get(keys, None)
            return super().match(keys)

    inner = Probing(*[StoreTimeout("slow")] * 3)
    store = GuardedStore(inner, Metrics(), failures=3, clock=clock)
    for _ in range(3):
        failing(store)
    clock.now += 1.01
    assert store.match(KEYS) == 1


def test_its_problem_is_the_last_failure_until_a_call_succeeds():
    store = GuardedStore(Scripted(StoreTimeout("slow")), Metrics())
    assert store.problem is None
    failing(store)
    assert store.problem == "slow"
    store.match(KEYS)
    assert store.problem is None


def test_want_of_room_is_a_problem_until_a_put_succeeds():
    wrapped = WrapperStore(GuardedStore(Scripted(StoreFull("full")), Metrics()))
    slots = Slots(memoryview(bytearray(8)), 8, [0], [8])
    with pytest.raises(StoreFull):
        wrapped.put(KEYS, slots)
    wrapped.match(KEYS)
    assert problem_of(wrapped) == "full"
    wrapped.put(KEYS, slots)
    assert problem_of(wrapped) is None
    wrapped.wrapped.around("put", lambda _: Filled([], 0, StoreFull("full too")), KEYS)
    assert problem_of(wrapped) == "full too"
    assert problem_of(Scripted()) is None


@pytest.mark.parametrize("error", [StoreFull("full"), ValueError("bad call")])
def test_what_says_nothing_about_the_stores_health_does_not_open_it(error, clock):
    store = GuardedStore(Scripted(*[error] * 10), Metrics(), failures=3, clock=clock)
    for _ in range(10):
        with pytest.raises(type(error)):
            store.match(KEYS)
    assert not store.is_open


def test_a_store_that_refuses_quickly_is_used_as_soon_as_it_works(clock):
    inner = Scripted(*[StoreUnavailable("read only")] * 10, 1)
    store = GuardedStore(inner, Metrics(), failures=3, clock=clock)
    for _ in range(3):
        failing(store)
    assert store.is_open
    with pytest.raises(StoreUnavailable, match="read only"):
        store.match(KEYS)
    while inner.script[0] != 1:
        failing(store)
    assert store.match(KEYS) == 1
    assert not store.is_open


def test_calls_seconds_and_bytes_are_counted():
    metrics = Metrics()
    store = GuardedStore(open_store("memory://", settings_of()), metrics)
    slots = Slots(memoryview(bytearray(b"abcd")), 4, [0], [4])
    store.put(KEYS, slots)
    store.match(KEYS)
    store.get(KEYS, slots)
    store.get([BlockKey("missing")], slots)
    store.clear("0" * 32)
    value = metrics.registry.get_sample_value
    assert value("pdstore_bytes_total", {"direction": "save"}) == 4
    assert value("pdstore_bytes_total", {"direction": "load"}) == 4
    assert value("pdstore_store_calls_total", {"verb": "get", "outcome": "ok"}) == 2
    assert value("pdstore_store_seconds_count", {"verb": "put"}) == 1
    assert value("pdstore_store_calls_total", {"verb": "clear", "outcome": "ok"}) == 1


def test_a_failed_call_is_counted_by_its_error():
    metrics = Metrics()
    store = GuardedStore(Scripted(StoreTimeout("slow")), metrics)
    with pytest.raises(StoreTimeout):
        store.match(KEYS)
    labels = {"verb": "match", "outcome": "StoreTimeout"}
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", labels) == 1
