"""GuardedStore: calls are counted, tried once more, and kept from a store that fails."""

from __future__ import annotations

import threading

import pytest

from pdstore.errors import StoreDenied, StoreError, StoreFull, StoreTimeout, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.guard import GuardedStore, problem_of
from pdstore.store.transfer import Moved
from pdstore.store.wrappers import WrapperStore
from tests.support.clock import Clock
from tests.support.kv import eventually, settings_of
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


class Away(Scripted):
    """Fails each call with an error, or lets it hang, until it is back."""

    def __init__(self, error=None):
        super().__init__()
        self.error, self.asked = error, []
        self.goes_on = threading.Event()
        if error is not None:
            self.goes_on.set()

    def match(self, keys):
        self.num_calls += 1
        self.asked += keys
        self.goes_on.wait(30)
        if self.error is not None:
            raise self.error
        return 1


@pytest.fixture
def guarded(closed_after):
    return lambda store, **more: closed_after(GuardedStore(store, Metrics(), **more))


def test_the_breaker_opens_after_failures_in_a_row_and_then_does_not_call(guarded):
    inner = Away(StoreDenied("no password"))
    store = guarded(inner, failures=3, open_s=60.0)
    for _ in range(3):
        assert not store.is_open
        with pytest.raises(StoreDenied, match="no password"):
            store.match(KEYS)
    assert store.is_open
    eventually(lambda: inner.num_calls == 4)  # by the breaker's own thread
    with pytest.raises(StoreDenied, match="times in a row; it is tried every 60 s"):
        store.match(KEYS)
    assert inner.num_calls == 4


def test_one_call_that_timed_out_opens_it_so_that_no_other_waits_as_long(guarded):
    inner = Away(StoreTimeout("slow"))
    store = guarded(inner, open_s=60.0)
    failing(store)
    assert store.is_open
    eventually(lambda: inner.num_calls == 2)
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="it is tried every 60 s"):
            store.match(KEYS)
    assert inner.num_calls == 2


def test_an_idle_store_is_probed_until_it_is_back_and_no_caller_pays_for_it(guarded):
    inner = Away(StoreTimeout("slow"))
    store = guarded(inner, open_s=0.01)
    failing(store)
    eventually(lambda: inner.num_calls > 4)
    assert store.is_open
    inner.error = None
    eventually(lambda: not store.is_open)
    assert store.problem is None
    num_calls = inner.num_calls
    assert store.match(KEYS) == 1
    assert inner.num_calls == num_calls + 1, "it is not probed any more"


def test_the_key_at_which_a_call_failed_is_searched_for(guarded):
    """In a cluster, other keys are on servers that answer."""
    inner = Away(StoreTimeout("slow", num_done=2))
    store = guarded(inner, open_s=0.01)
    with pytest.raises(StoreTimeout):
        store.match([BlockKey(name) for name in "abcd"])
    eventually(lambda: inner.num_calls > 1)
    assert inner.asked[4] == "c"


def test_large_values_that_break_their_connection_keep_no_marker_out(guarded):
    """A limit of the server may end each large value only; it answers everything else."""

    class Limited(Scripted):
        def put(self, keys, slots):
            if slots.sizes[0] > 8:
                raise StoreTimeout("reset")
            return len(keys)

    store = guarded(Limited(), open_s=60.0)
    large, marker = (Slots(memoryview(bytearray(16)), 16, [0], [size]) for size in (16, 8))
    for _ in range(4):
        with pytest.raises(StoreTimeout, match="reset"):
            store.put(KEYS, large)
        eventually(lambda: not store.is_open)
        assert store.put(KEYS, marker) == 1


def test_a_doubted_store_is_asked_and_refused_only_while_it_does_not_answer(guarded):
    """The calls of another process of the instance have timed out."""
    inner = Away()
    store = guarded(inner)
    store.doubt()
    assert not store.is_open, "it may well be right"
    eventually(lambda: store.is_open)
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        store.match(KEYS)
    assert inner.num_calls == 1
    inner.goes_on.set()
    eventually(lambda: not store.is_open)
    assert store.match(KEYS) == 1


def test_a_breaker_leaves_no_thread(guarded):
    before = set(threading.enumerate())
    store = guarded(Away(StoreTimeout("slow")), open_s=60.0)
    failing(store)
    [prober] = set(threading.enumerate()) - before
    assert prober.name == "pdstore-breaker"
    store.close()
    prober.join(10)
    assert not prober.is_alive()


def test_its_problem_is_the_last_failure_until_a_call_succeeds():
    store = GuardedStore(Scripted(StoreError("odd")), Metrics())
    assert store.problem is None
    with pytest.raises(StoreError):
        store.match(KEYS)
    assert store.problem == "odd"
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
    wrapped.wrapped.around("put", KEYS, lambda: Moved(None, error=StoreFull("full too")))
    assert problem_of(wrapped) == "full too"
    assert problem_of(Scripted()) is None


@pytest.mark.parametrize("error", [StoreFull("full"), ValueError("bad call")])
def test_what_says_nothing_about_the_stores_health_does_not_open_it(error, clock):
    store = GuardedStore(Scripted(*[error] * 10), Metrics(), failures=3, clock=clock)
    for _ in range(10):
        with pytest.raises(type(error)):
            store.match(KEYS)
    assert not store.is_open


def test_a_store_that_refuses_quickly_is_used_as_soon_as_it_works(guarded, clock):
    inner = Away(StoreUnavailable("read only"))
    store = guarded(inner, failures=3, open_s=60.0, clock=clock)
    for _ in range(3):
        failing(store)
    assert store.is_open
    with pytest.raises(StoreUnavailable, match="read only"):
        store.match(KEYS)
    inner.error = None
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


def test_a_failed_call_is_counted_by_its_error(closed_after):
    metrics = Metrics()
    store = closed_after(GuardedStore(Scripted(StoreTimeout("slow")), metrics))
    with pytest.raises(StoreTimeout):
        store.match(KEYS)
    labels = {"verb": "match", "outcome": "StoreTimeout"}
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", labels) == 1
