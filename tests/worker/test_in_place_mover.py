"""InPlaceMover: values move in the store's own memory, and count only if they stayed there."""

from __future__ import annotations

import threading

import pytest

from pdstore import JobResult, LayerSpec
from pdstore.format.block import HEADER_BYTES
from pdstore.outcome import Reason
from pdstore.store import open_store
from pdstore.store.in_place import InPlace
from pdstore.testing.values import get
from tests.support.kv import BLOCK_BYTES, POISON, Instance, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save

SIZE = BLOCK_BYTES + HEADER_BYTES


class Spied(InPlace):
    """Passes every call to an arena and can interfere with each."""

    def __init__(self, arena):
        self._arena = arena
        self.calls: list[str] = []
        self.before_still_there = lambda loan: None
        self.after_borrow = lambda: None

    def __getattr__(self, name):
        if name in ("fill", "take"):  # then it is no `NativeInPlace`, and all is done step by step
            raise AttributeError(name)
        return getattr(self._arena, name)

    @property
    def span_bytes(self):
        return self._arena.span_bytes

    def memory(self):
        return self._arena.memory()

    def reserve(self, keys, sizes):
        self.calls.append("reserve")
        return self._arena.reserve(keys, sizes)

    def publish(self, reservation, count):
        self.calls.append("publish")
        return self._arena.publish(reservation, count)

    def abandon(self, reservation):
        self.calls.append("abandon")
        self._arena.abandon(reservation)

    def borrow(self, keys, sizes):
        self.calls.append("borrow")
        try:
            loan = self._arena.borrow(keys, sizes)
        finally:
            self.after_borrow()
        return loan

    def still_there(self, loan):
        self.calls.append("still_there")
        self.before_still_there(loan)
        return self._arena.still_there(loan)

    def release(self, loan):
        self.calls.append("release")
        self._arena.release(loan)


@pytest.fixture
def store(arena):
    return Spied(arena)


def num_reserved(arena) -> int:
    return arena.counts().reserved


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200, 320])
def test_what_p_saves_in_place_d_loads_in_place(instance, store, num_tokens, workers):
    p, d = (instance(fill=f, workers=workers, range_bytes=2 * BLOCK_BYTES) for f in (None, POISON))
    assert save(p, range(num_tokens)) == JobResult(num_tokens)
    assert load(d, range(num_tokens)) == JobResult(num_tokens)
    assert_loaded(p, d, num_tokens)
    assert {"reserve", "publish", "borrow", "still_there", "release"} <= set(store.calls)
    assert store.calls.count("reserve") == store.calls.count("abandon")
    assert store.calls.count("borrow") == store.calls.count("release")


def test_no_staging_is_made_for_a_store_in_place(instance, store):
    p = instance(staging="64KiB")  # too little for any block
    assert save(p, range(200)).num_tokens == 200


def test_parts_of_two_groups_and_shards_come_back(instance):
    layers = (LayerSpec(2, 8), LayerSpec(2, 8, kind="sliding", window=64))
    p, d = (instance(fill=f, kv_shards=2, layers=layers, range_bytes=1) for f in (None, POISON))
    assert save(p, range(200)).num_tokens == 200
    assert load(d, range(200)).num_tokens == 200


def test_a_handoff_in_place_is_done_when_all_is_there(instance):
    p, d = instance(), instance(fill=POISON)
    keys = p.cache.keys(range(200))
    attempt, params = p.cache.announce(keys)
    assert p.pool.save(keys, P_BLOCKS, handoff=attempt).wait(10).reason is None
    found = eventually(d.cache.lookup(d.cache.keys(range(200)), params).poll)
    assert found.num_tokens == 200
    assert d.pool.load(found.keys, D_BLOCKS).wait(10).num_tokens == 200
    assert_loaded(p, d, 200)


def test_values_that_are_stored_are_not_copied_again(instance, store):
    first, second = instance(), instance()
    save(first, range(200))
    attempt, _ = second.cache.announce(second.cache.keys(range(200)))
    assert save(second, range(200), handoff=attempt).num_tokens == 200
    assert load(second, range(200)).num_tokens == 200


def test_a_value_that_went_away_during_the_copy_does_not_count(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    gone = p.cache.keys(range(200)).store_keys(p.layout.parts)[1]
    store.before_still_there = lambda loan: arena.remove([gone])
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.LOST)


def test_nothing_counts_behind_a_value_that_went_away_during_the_copy(instance, store, arena):
    """The last range, blocks 14 to 16, is two copies: block 15 goes before the first is over."""
    more = {"workers": 2, "num_blocks": 80, "range_bytes": 2 * BLOCK_BYTES}
    p, d = (instance(fill=f, **more) for f in (None, POISON))
    keys, blocks = p.cache.keys(range(17 * 64)), list(range(68))
    assert p.pool.save(keys, blocks).wait(10).reason is None
    names = keys.store_keys(p.layout.parts)

    def lose(loan):
        if store.calls.count("still_there") == 8:
            arena.remove([names[15]])

    store.before_still_there = lose
    result = d.pool.load(keys, blocks).wait(10)
    assert store.calls.count("still_there") == 9
    assert (result.num_tokens, result.reason) == (15 * 64, Reason.LOST)


def test_memory_that_another_value_took_over_during_the_copy_does_not_count(instance, store, arena):
    """The bytes were verified; then they changed under the copy."""
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(64))
    keys = p.cache.keys(range(64)).store_keys(p.layout.parts)

    def replace(loan):
        arena.remove(keys)
        for n in range(100):
            other = instance_keys(p, n)
            reservation = arena.reserve(other, [BLOCK_BYTES + HEADER_BYTES])
            reservation.places.value(0)[:] = b"\xee" * (BLOCK_BYTES + HEADER_BYTES)
            arena.publish(reservation, 1)

    store.before_still_there = replace
    result = d.pool.load(d.cache.keys(range(64)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.LOST)


def test_a_value_whose_place_was_taken_before_it_was_looked_at_is_lost_not_wrong(
    instance, store, arena, caplog
):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(64))
    keys = p.cache.keys(range(64)).store_keys(p.layout.parts)

    def replace():
        arena.remove(keys)
        for n in range(100):
            reservation = arena.reserve(instance_keys(p, n), [SIZE])
            reservation.places.value(0)[:] = b"\xee" * SIZE
            arena.publish(reservation, 1)

    once(store, replace)
    result = d.pool.load(d.cache.keys(range(64)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.LOST)
    assert "is removed" not in caplog.text


def test_a_damaged_value_is_removed_also_behind_one_that_went_away(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    names = p.cache.keys(range(200)).store_keys(p.layout.parts)
    arena.borrow(names[2:3], [SIZE]).places.value(0)[HEADER_BYTES] ^= 1
    once(store, lambda: arena.remove(names[:1]))
    assert load(d, range(200)).num_tokens == 0
    assert arena.which_stored(names) == [False, True, False, True]


def test_a_value_that_went_away_before_one_of_another_length_is_lost_not_wrong(
    instance, store, arena, caplog
):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    names = p.cache.keys(range(200)).store_keys(p.layout.parts)
    arena.remove(names[2:3])
    arena.publish(arena.reserve(names[2:3], [5000]), 1)
    once(store, lambda: arena.remove(names[1:2]))
    assert load(d, range(200)) == JobResult(64, Reason.LOST)
    assert f"{names[1]} is" not in caplog.text


@pytest.mark.parametrize("answer", [None, -1, 9])
def test_an_impossible_answer_about_what_has_stayed_is_an_error_of_the_store(
    instance, store, monkeypatch, answer
):
    p, d = instance(), instance(fill=POISON)
    save(p, range(200))
    monkeypatch.setattr(store, "still_there", lambda loan: answer)
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (0, Reason.STORE_ERROR)
    assert len(str(result.error)) < 200


def once(store, happens):
    """Does something behind the next call of `borrow`, and no more."""

    def happen():
        store.after_borrow = lambda: None
        happens()

    store.after_borrow = happen


def instance_keys(p, n):
    return p.cache.keys([n + 1000] * 64).store_keys(p.layout.parts)


@pytest.mark.parametrize("at", [0, 5, HEADER_BYTES, BLOCK_BYTES])
def test_a_damaged_value_is_a_miss_and_is_removed(instance, arena, at):
    p, d = instance(), instance(fill=POISON)
    save(p, range(200))
    key = p.cache.keys(range(200)).store_keys(p.layout.parts)[1]
    loan = arena.borrow([key], [BLOCK_BYTES + HEADER_BYTES])
    loan.places.value(0)[at] ^= 1
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert_loaded(p, d, 64)
    assert arena.match([key]) == 0


def test_a_value_of_another_length_is_a_miss_and_those_before_it_count(instance, arena):
    p, d = instance(), instance(fill=POISON)
    save(p, range(200))
    key = p.cache.keys(range(200)).store_keys(p.layout.parts)[2]
    arena.remove([key])
    reservation = arena.reserve([key], [5000])
    arena.publish(reservation, 1)
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.CORRUPT)
    assert_loaded(p, d, 128)


def test_a_full_store_ends_the_save_and_says_how_much_is_durable(tmp_path, library):
    arena = open_store(f"shm://small?size=1MiB&dir={tmp_path}&lease=600", settings_of())
    p = Instance(arena, num_blocks=200)
    job = p.pool.save(p.cache.keys(range(3000)), list(range(190)))
    result = job.wait(10)
    assert result.reason is Reason.STORE_FULL
    assert 0 < result.num_tokens < 3000
    assert get(arena, p.cache.keys(range(64)).store_keys(p.layout.parts), [BLOCK_BYTES + 64])
    assert num_reserved(arena) == 0
    p.close()
    arena.close()


def test_a_cancelled_save_gives_its_places_back(instance, store, arena):
    class Event:
        reached, fired = threading.Event(), threading.Event()

        def synchronize(self):
            self.reached.set()
            assert self.fired.wait(10)

    p, event = instance(), Event()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS, ready=event)
    assert event.reached.wait(10)
    job.cancel()
    event.fired.set()
    p.pool.close()
    assert job.result.reason is Reason.CANCELLED
    assert num_reserved(arena) == 0
    assert store.calls.count("reserve") == store.calls.count("abandon")
