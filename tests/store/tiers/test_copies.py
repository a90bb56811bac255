"""What goes down behind a put, within which bounds, and what is counted of the rest."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pdstore.errors import StoreClosed, StoreError, StoreFull, StoreTimeout
from pdstore.format import block
from pdstore.format.keys import HASH_BYTES, POOL_ID_KEY, BlockKey
from pdstore.store.arena.store import ArenaStore
from pdstore.store.memory import MemoryStore
from pdstore.store.tiers import copies
from pdstore.store.tiers.copies import Copier
from pdstore.store.tiers.copy_queue import CopyQueue
from pdstore.store.tiers.lower import Limits
from pdstore.store.tiers.store import TieredStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import assert_stored, get, put
from tests.store.tiers.conftest import copies_of, held
from tests.support.kv import eventually

SIZE = 4096
NAMESPACE = "5" * 32


def values_of(keys):
    return [content(key, SIZE) for key in keys]


def put_all(store, keys):
    assert put(store, keys, values_of(keys)) == len(keys)


def test_blocks_are_copied_down_and_nothing_else(open_tiers):
    first, below = MemoryStore(), MemoryStore()
    store = open_tiers(first, below)
    [a, b, c] = fresh_keys(3)
    marker = BlockKey(f"pds1:{NAMESPACE}:handoff:{'a' * 32}:0:done")
    keys = [a, b, c, BlockKey(f"{c}:partial:7"), marker, POOL_ID_KEY]
    put_all(store, keys)
    assert store.flush()
    assert first.which_stored(keys) == [True] * 6
    assert below.which_stored(keys) == [True] * 3 + [False] * 3
    assert copies_of(store) == {"copied": 3}


def test_what_is_below_already_is_neither_read_nor_counted(open_tiers):
    first, below = MemoryStore(), MemoryStore()
    keys = fresh_keys(4)
    put_all(below, keys[:2])
    store = open_tiers(first, below)
    put_all(store, keys)
    assert store.flush()
    assert copies_of(store) == {"copied": 2}


def test_beyond_the_bound_the_end_of_the_oldest_put_is_given_up():
    queue = CopyQueue(most_bytes=5 * SIZE)
    old, new = fresh_keys(4), fresh_keys(3)
    queue.add(old, [SIZE] * 4)
    queue.add(new, [SIZE] * 3)
    assert queue.num_bytes == 5 * SIZE
    assert queue.num_given_up == 2
    assert [key for key, _ in queue.take(100 * SIZE)] == old[:2]
    queue.end(0)
    assert [key for key, _ in queue.take(100 * SIZE)] == new


def test_puts_of_which_nothing_waits_take_no_memory():
    queue = CopyQueue(most_bytes=100 * SIZE)
    keys, others = fresh_keys(3), fresh_keys(2)
    for _ in range(50):
        queue.add(keys, [SIZE] * 3)
    assert len(queue) == 1
    queue.add(others, [SIZE] * 2)
    queue.drop(others.__contains__)
    assert len(queue) == 1
    assert [key for key, _ in queue.take(100 * SIZE)] == keys


def test_a_block_that_is_given_up_takes_those_behind_it_in_its_put_along():
    queue = CopyQueue(most_bytes=100 * SIZE)
    one, other = fresh_keys(6), fresh_keys(2)
    queue.add(one, [SIZE] * 6)
    queue.add(other, [SIZE] * 2)
    assert [key for key, _ in queue.take(3 * SIZE)] == one[:3]
    queue.end(num_given_up=1)
    assert queue.num_given_up == 4
    assert [key for key, _ in queue.take(100 * SIZE)] == other


def test_what_is_given_up_is_of_the_put_that_was_taken_whatever_comes_meanwhile():
    queue = CopyQueue(most_bytes=4 * SIZE)
    one, other = fresh_keys(2), fresh_keys(5)
    queue.add(one, [SIZE] * 2)
    assert [key for key, _ in queue.take(100 * SIZE)] == one
    queue.add(other, [SIZE] * 5)
    queue.end(num_given_up=1)
    assert queue.num_given_up == 2
    assert [key for key, _ in queue.take(100 * SIZE)] == other[:4]


def test_a_batch_fits_its_memory_in_slots_of_the_largest_value():
    queue = CopyQueue(most_bytes=1 << 40)
    keys = fresh_keys(6)
    queue.add(keys, [64, 64, 64, 1 << 20, 64, 4 << 20])
    lengths = []
    while batch := queue.take(1 << 20):
        lengths.append(len(batch))
        queue.end(0)
    assert lengths == [3, 1, 1, 1]


def test_no_more_bytes_a_second_go_down_than_copy_says():
    first, below, now = MemoryStore(), MemoryStore(), [100.0]
    copier = Copier(
        first,
        below,
        is_out=lambda: False,
        num_right=len,
        bytes_per_s=SIZE,
        clock=lambda: now[0],
    )
    one, other = fresh_keys(2), fresh_keys(1)
    put_all(first, [*one, *other])
    with contextlib.closing(first), contextlib.closing(below):
        copier.add(one, [SIZE] * 2)
        eventually(lambda: below.match(one) == 2, 10)
        copier.add(other, [SIZE])
        assert not copier.flush(0.2), "it has to wait for two seconds of the clock"
        now[0] += 2.0
        copier.add([], [])
        assert copier.flush(10)
        assert below.match(other) == 1
        copier.close(1.0)


def test_what_is_below_already_takes_nothing_of_the_rate(open_tiers):
    below, keys, new = MemoryStore(), fresh_keys(3), fresh_keys(1)
    put_all(below, keys)
    store = open_tiers(MemoryStore(), below, limits=[Limits(copy_bytes_per_s=1)])
    for _ in range(5):
        put_all(store, keys)
        assert store.flush(10), "it would wait for hours"
    put_all(store, new)
    assert store.flush(10)
    assert below.match(new) == 1


def test_a_block_evicted_before_its_copy_is_lost_and_those_behind_it_are_given_up(open_tiers):
    first, below = MemoryStore(), Faulty(MemoryStore())
    store = open_tiers(first, below)
    keys, more = fresh_keys(5), fresh_keys(1)
    with held(below):
        put_all(store, more)  # its copy hangs, and what follows waits
        eventually(lambda: not store.flush(0.0), 5)
        put_all(store, keys)
        first.remove(keys[2:3])
    assert store.flush()
    assert below.match(keys) == 2
    assert copies_of(store) == {"copied": 3, "lost": 1, "given_up": 2}


def test_what_is_behind_a_batch_that_ends_in_a_lost_block_is_given_up(open_tiers, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_BYTES", 3 * SIZE)
    first, below = MemoryStore(), Faulty(MemoryStore())
    store, keys, more = open_tiers(first, below), fresh_keys(9), fresh_keys(1)
    with held(below):
        put_all(store, more)  # its copy hangs, and what follows waits
        eventually(lambda: not store.flush(0.0), 5)
        put_all(store, keys)
        first.remove(keys[2:3])
    assert store.flush()
    assert below.wrapped.which_stored(keys) == [True] * 2 + [False] * 7
    assert copies_of(store) == {"copied": 3, "lost": 1, "given_up": 6}


def test_a_value_that_is_wrong_in_the_first_tier_does_not_go_down(open_tiers):
    first, below = MemoryStore(), MemoryStore()
    store = TieredStore([first, below])
    keys, values = fresh_keys(3), []
    for _ in keys:
        value = bytearray(block.HEADER_BYTES + 100)
        header = block.Header(0, 0, 0, 16, 0, 0, bytes(HASH_BYTES), bytes(HASH_BYTES))
        block.seal(memoryview(value), header)
        values.append(bytes(value))
    values[1] = values[1][:-1] + b"\1"
    with contextlib.closing(store):
        put(store, keys, values)
        assert store.flush()
        assert below.which_stored(keys) == [True, False, False]
        assert copies_of(store) == {"copied": 1, "lost": 1, "given_up": 1}


def test_a_full_tier_below_gives_up_and_takes_the_next_put(open_tiers):
    below = MemoryStore(budget=2 * SIZE, lease_s=600)
    store = open_tiers(MemoryStore(), below)
    keys, others = fresh_keys(3), fresh_keys(1)
    put_all(store, keys)
    assert store.flush()
    assert copies_of(store) == {"copied": 2, "given_up": 1}
    below.remove(keys)
    put_all(store, others)
    assert store.flush()
    assert below.match(others) == 1


def test_a_put_that_falls_short_sends_down_what_it_took(open_tiers):
    first, below = MemoryStore(budget=2 * SIZE), MemoryStore()
    store, keys = open_tiers(first, below), fresh_keys(3)
    with pytest.raises(StoreFull) as caught:
        put(store, keys, values_of(keys))
    assert caught.value.num_done == 2
    assert store.flush()
    assert below.match(keys) == 2


def test_clear_waits_for_the_copy_under_way_and_drops_the_others(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store = open_tiers(first, below)
    [*keys, a, b, c] = fresh_keys(6)
    later = [a, b, c]
    namespace = keys[0].split(":")[1]
    cleared = threading.Thread(target=store.clear, args=(namespace,))
    with held(below):
        put_all(store, keys)
        time.sleep(0.05)  # the copy begins, or is dropped: both must end in nothing
        put_all(store, later)
        cleared.start()
    cleared.join(20)
    assert not cleared.is_alive()
    assert store.flush()
    assert not any(first.which_stored([*keys, *later]) + inner.which_stored([*keys, *later]))


class ClearedBeside(WrapperStore):
    """Another process clears the pool while this one copies: before each put below."""

    def __init__(self, store, first):
        super().__init__(store)
        self.first = first

    def put(self, keys, slots):
        self.first.remove(keys)
        return super().put(keys, slots)


def test_a_copy_of_what_another_process_clears_is_taken_back(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    store, keys = open_tiers(first, ClearedBeside(inner, first)), fresh_keys(3)
    put_all(store, keys)
    assert store.flush()
    assert inner.match(keys) == store.match(keys) == 0
    assert copies_of(store) == {"lost": 3}


def test_a_put_succeeds_while_no_thread_can_start(open_tiers, monkeypatch):
    first, below = MemoryStore(), MemoryStore()
    store, keys = open_tiers(first, below), fresh_keys(3)

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(copies, "Ticker", no_thread)
        put_all(store, keys[:2])
    assert not store.flush(0.0)
    put_all(store, keys[2:])
    assert store.flush(10)
    assert below.match(keys) == 3


class Failing(ClearedBeside):
    """Its removals fail at first; its puts store the values, and may then fail."""

    def __init__(self, store, first, error=None):
        super().__init__(store, first)
        self.error = error
        self.num_failures = 3

    def put(self, keys, slots):
        num_done = super().put(keys, slots)
        if self.error is not None:
            raise self.error
        return num_done

    def remove(self, keys):
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise StoreError("not now")
        super().remove(keys)


@pytest.mark.parametrize("error", [None, StoreTimeout("too late")])
def test_what_cannot_be_taken_back_at_once_is_taken_back_later(open_tiers, error):
    first, inner = MemoryStore(), MemoryStore()
    below = Failing(inner, first, error)
    store, keys = open_tiers(first, below), fresh_keys(3)
    put_all(store, keys)
    eventually(lambda: below.num_failures < 3, 10)
    assert inner.match(keys) == 3
    eventually(lambda: inner.match(keys) == 0, 10)
    assert store.flush(10)


def test_what_is_gone_from_a_first_tier_that_only_matches_is_taken_back(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    [one, *others] = fresh_keys(4)

    class ClearedInPart(ClearedBeside):
        def put(self, keys, slots):
            self.first.remove(others[1:2])
            return self.wrapped.put(keys, slots)

    store = open_tiers(WrapperStore(first), ClearedInPart(inner, first))
    put_all(store, [one, *others])
    assert store.flush()
    assert inner.which_stored([one, *others]) == [True, True, False, True]
    assert copies_of(store) == {"copied": 3, "lost": 1}


def test_remove_reaches_every_tier_and_queued_copies(open_tiers):
    stores = MemoryStore(), MemoryStore(), MemoryStore()
    store, keys = open_tiers(*stores), fresh_keys(3)
    put_all(store, keys)
    assert store.flush()
    assert [each.match(keys) for each in stores] == [3, 3, 3]
    store.remove(keys[1:2])
    assert [each.match(keys) for each in stores] == [1, 1, 1]


def test_close_drains_nothing_and_ends_within_a_second(open_tiers):
    first, inner = MemoryStore("memory://close"), MemoryStore("memory://close-below")
    below = Faulty(inner)
    store = open_tiers(first, below)
    with held(below):
        put_all(store, fresh_keys(3))
        began_at = time.monotonic()
        store.close()
        assert time.monotonic() - began_at < 1.0


class HangsAtClose(Faulty):
    """A directory of which a dead server takes no removal of a file."""

    def close(self):
        self._open.wait(60)
        super().close()


def test_close_ends_within_a_second_if_the_stores_below_do_not(open_tiers):
    below = [HangsAtClose(MemoryStore()) for _ in range(2)]
    store, keys = open_tiers(MemoryStore(), *below), fresh_keys(3)
    with held(below[0]), held(below[1]):
        put_all(store, keys)
        began_at = time.monotonic()
        store.close()
        assert time.monotonic() - began_at < 1.0
    for each in below:
        eventually(lambda each=each: _is_closed(each.wrapped, keys), 10)


def _is_closed(store, keys):
    with contextlib.suppress(StoreClosed):
        return store.match(keys) < 0
    return True


def test_copies_to_two_tiers_do_not_wait_for_each_other(open_tiers):
    middle, last = Faulty(MemoryStore()), MemoryStore()
    store, keys = open_tiers(MemoryStore(), middle, last), fresh_keys(3)
    with held(middle):
        put_all(store, keys)
        eventually(lambda: last.match(keys) == 3, 5)
    assert store.flush()
    assert_stored(middle, keys, values_of(keys))


def test_a_tier_that_is_out_keeps_its_queue_until_it_is_back(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store = open_tiers(first, below, limits=[Limits(look_s=0.02)])
    keys = fresh_keys(3)
    with held(below):
        assert store.match(keys) == 0
        put_all(store, keys)
        assert get(store, keys, [SIZE] * 3) == values_of(keys)
        assert not store.flush(0.1)
    assert store.flush(10)
    assert inner.match(keys) == 3


def test_a_copy_ends_no_lease_of_what_d_has_not_read(library, open_tiers, tmp_path, name):
    small = {"size": 1 << 20, "slab_bytes": 1 << 20, "fresh_s": 0, "lease_s": 60}
    arena, below = ArenaStore(library, name, directory=tmp_path, **small), MemoryStore()
    store, keys = open_tiers(arena, below), fresh_keys(8)
    put(arena, keys, [content(key, SIZE) for key in keys])
    assert arena.match(keys) == 8
    store.copy_down(keys, [SIZE] * 8)
    assert store.flush()
    assert below.match(keys) == 8
    for [key] in map(fresh_keys, [1] * 300):
        put(arena, [key], [content(key, SIZE)])
    assert arena.which_stored(keys) == [True] * 8
