"""Batches, what is tried again, and the library's codes as errors and misses."""

from __future__ import annotations

import contextlib
import time

import pytest

from pdstore.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable, WrongLength
from pdstore.store.base import Slots
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put, start_background
from tests.support.kv import eventually
from tests.support.mooncake_double import LibraryDouble, RawDouble, double_store

SIZE = 256


def test_a_read_that_outlived_its_lease_is_tried_once_more_in_halves(store, raw):
    """Rule 5: -707 fails the whole batch."""
    keys = fresh_keys(8)
    raw.values = dict.fromkeys(keys, SIZE)
    raw.script = [("get", [-707] * 8)]
    assert len(get(store, keys, [SIZE] * 8)) == 8
    assert [call[1] for call in raw.calls] == [keys, keys[:4], keys[4:]]
    raw.calls.clear()
    raw.script = [("get", [-707] * 8), ("get", [0] * 4), ("get", [0, -707, 0, 0])]
    assert len(get(store, keys, [SIZE] * 8)) == 5
    assert raw.count("get") == 3


def test_a_batch_is_no_larger_than_what_the_lease_allows(open_double, raw):
    """Rule 3: a third of the lease, at the rate seen lately (1 GB/s before any was)."""
    store = open_double(lease=0.03)
    keys, size = fresh_keys(20), 1 << 20
    raw.values = dict.fromkeys(keys, size)
    slots = Slots(memoryview(bytearray(size)), size, [0] * 20, [size] * 20)
    assert store.get(keys, slots) == 20
    assert [len(call[1]) for call in raw.calls] == [9, 9, 2]


def test_memory_that_the_transport_cannot_move_goes_through_a_slab_that_it_can(open_double, raw):
    """Rule 2: RDMA moves registered memory only."""
    store = open_double(protocol="rdma")
    put(store, fresh_keys(3), [b"x" * SIZE] * 3)
    slots = Slots(store.allocate(1 << 20), SIZE, [1, 0], [SIZE] * 2)
    store.put(fresh_keys(2), slots)
    assert len(raw.moved) == 5
    for _, address, size, _ in raw.moved:
        assert any(b <= address and address + size <= b + n for b, n in raw.buffers)


def test_staging_is_registered_once_whenever_it_was_allocated(open_double, raw):
    """Rule 2."""
    store = open_double(protocol="rdma")
    views = [store.allocate(1 << 20)]
    assert raw.buffers == []
    for _ in range(2):
        store.put(fresh_keys(1), Slots(views[0], SIZE, [0], [SIZE]))
        assert [size for _, size in raw.buffers] == [1 << 20]
    views.append(store.allocate(2 << 20))
    assert [size for _, size in raw.buffers] == [1 << 20, 2 << 20]
    del views[0]
    third = store.allocate(3 << 20)
    assert [size for _, size in raw.buffers] == [2 << 20, len(third)]


def test_a_call_takes_another_connection_while_the_first_is_busy(server):
    """The library copies with one thread for each connection."""
    first, second = RawDouble(), RawDouble()
    keys = fresh_keys(2)
    for raw in (first, second):
        raw.values = dict.fromkeys(keys, SIZE)
    library = LibraryDouble(first, second)
    with contextlib.closing(double_store(library, server, connections=3)) as store:
        assert len(get(store, keys, [SIZE] * 2)) == 2
        assert library.firsts == [True]  # what is not needed is not connected
        first.gate.clear()
        blocked = start_background(lambda: get(store, keys, [SIZE] * 2))
        eventually(lambda: first.count("get") == 2)
        assert len(get(store, keys, [SIZE] * 2)) == 2
        assert second.count("get") == 1
        first.gate.set()
        blocked(30)
        assert library.firsts == [True, False]  # only one lends memory
    assert first.is_closed
    assert second.is_closed


class SlowLink(RawDouble):
    """Reads 1 MiB in 20 ms while it is slow, and then loses every call that reads more than 1."""

    is_slow = True

    def batch_get_into(self, keys, addresses, sizes):
        codes = super().batch_get_into(keys, addresses, sizes)
        if self.is_slow:
            time.sleep(sum(sizes) / (50 << 20))
        return [-707] * len(keys) if self.is_slow and sum(sizes) > 1 << 20 else codes


def test_a_read_that_outlived_its_lease_makes_batches_smaller_until_reads_are_fast(server):
    """Rule 3: else nothing would ever be read over a slow network."""
    raw, keys, size = SlowLink(), fresh_keys(40), 64 << 10
    raw.values = dict.fromkeys(keys, size)
    slots = Slots(memoryview(bytearray(size)), size, [0] * 40, [size] * 40)
    with contextlib.closing(double_store(LibraryDouble(raw), server, lease=0.03)) as store:
        assert store.get(keys, slots) == 0
        assert store.get(keys, slots) == 40
        raw.is_slow = False

        def is_one_call():
            before = raw.count("get")
            assert store.get(keys, slots) == 40
            return raw.count("get") == before + 1

        assert not is_one_call()
        eventually(is_one_call)


def test_no_room_is_tried_again_after_growing_pauses_and_then_store_full(store, raw):
    """Rule 4: after 10, 30 and 90 ms; only the keys that found no room."""
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0]), ("put", [-200]), ("put", [-200])]
    start = time.monotonic()
    assert put(store, keys, [b"x" * SIZE] * 3) == 3
    assert time.monotonic() - start >= 0.13
    assert [call[1] for call in raw.calls if call[0] == "put"] == [keys, *[[keys[1]]] * 3]
    raw.calls.clear()
    keys = fresh_keys(3)
    raw.script = [("put", [0, -200, 0])] + [("put", [-200])] * 3
    with pytest.raises(StoreFull) as caught:
        put(store, keys, [b"x" * SIZE] * 3)
    assert caught.value.num_done == 1


def test_a_failed_transfer_is_put_once_more_and_then_unavailable(store, raw):
    """Rule 4."""
    keys = fresh_keys(2)
    raw.script = [("put", [0, -800])]
    assert put(store, keys, [b"x"] * 2) == 2
    assert raw.count("put") == 2
    raw.calls.clear()
    raw.script = [("put", [-800]), ("put", [-800])]
    with pytest.raises(StoreUnavailable, match="holds the memory"):
        put(store, fresh_keys(1), [b"x"])
    assert raw.count("put") == 2


def test_a_value_that_is_evicted_before_it_is_leased_is_put_again(store, raw):
    """Rule 4."""
    keys = fresh_keys(1)
    raw.script = [("put", [0])]
    evicted = []

    def evict_once(asked):
        if not evicted:
            evicted.append(raw.values.pop(keys[0]))
        return [int(key in raw.values) for key in asked]

    raw.batch_is_exist = evict_once
    assert put(store, keys, [b"x"]) == 1
    assert raw.count("put") == 2


@pytest.mark.parametrize("code", [-700, -703, -704, -707, -800])
def test_what_cannot_be_read_now_is_a_miss(store, raw, code):
    """Rule 5."""
    keys = fresh_keys(3)
    put(store, keys, [b"x" * SIZE] * 3)
    raw.script = [("get", [0, code, 0])]
    if code == -707:
        raw.script += [("get", [0]), ("get", [code, 0])]
    assert get(store, keys, [SIZE] * 3) == [b"\xee" * SIZE]


@pytest.mark.parametrize(
    ("code", "error"),
    [(-900, StoreUnavailable), (-901, StoreTimeout), (-1, StoreUnavailable), (-601, StoreError)],
)
@pytest.mark.parametrize("verb", ["exist", "get", "put", "remove"])
def test_an_outage_is_an_error_that_counts_what_was_done(store, raw, verb, code, error):
    """Rule 5: not a miss, so that the breaker hears of it."""
    keys = fresh_keys(3)
    raw.values = dict.fromkeys(keys, SIZE)
    raw.script = [(verb, [0, code, 0])]
    call = {
        "exist": lambda: store.match(keys),
        "get": lambda: get(store, keys, [SIZE] * 3),
        "put": lambda: put(store, keys, [b"x" * SIZE] * 3),
        "remove": lambda: store.remove(keys),
    }[verb]
    if verb == "put" and code == -601:
        assert call() == 3, "the keys are there, whatever the put said"
        return
    with pytest.raises(error, match=str(code)) as caught:
        call()
    assert caught.value.num_done == (0 if verb == "remove" else 1)


@pytest.mark.parametrize(
    ("code", "error"), [(-900, StoreUnavailable), (-901, StoreTimeout), (-600, StoreError)]
)
def test_a_clear_is_one_call_and_its_code_is_an_error(store, raw, code, error):
    """Rule 12."""
    namespace = "0123456789abcdef" * 2
    store.clear(namespace)
    assert raw.calls == [("clear", [f"^pds1:{namespace}:"])]
    raw.script = [("clear", [code])]
    with pytest.raises(error, match=rf"clear of pds1:{namespace}:.*\({code}\)"):
        store.clear(namespace)
    assert list(store.codes().values()) == [1]
    assert f"({code})" in next(iter(store.codes())), "a label of the metric, after its meaning"


def test_a_refused_call_is_no_wrong_length_where_the_length_is_right_or_not_told(store, raw):
    """A wrong length would be removed."""
    keys = fresh_keys(1)
    for size, words in ((-901, "in time"), (-900, "not answer"), (SIZE, "invalid arguments")):
        raw.values, raw.sizes = {keys[0]: SIZE}, {keys[0]: size}
        raw.script = [("get", [-600])]
        with pytest.raises(StoreError, match=words) as caught:
            get(store, keys, [SIZE])
        assert not isinstance(caught.value, WrongLength)
    raw.script, raw.sizes = [("get", [-600])], {keys[0]: -704}
    assert get(store, keys, [SIZE]) == [], "evicted meanwhile"
