"""Values of an arena move in its own memory, a share in one call; only what stayed there counts."""

from __future__ import annotations

import threading
import time

import pytest

from pdstore import JobResult
from pdstore.errors import Reason, StoreFull, StoreTimeout
from pdstore.format.block import HEADER_BYTES
from pdstore.format.plan import PromptSave, SavePlan
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.base import FRESH_S
from pdstore.store.guard import GuardedStore
from pdstore.testing.values import get, put
from pdstore.worker.swap.native import NativeSwap
from tests.support.arena_kit import SpiedArena, place_of
from tests.support.kv import BLOCK_BYTES, POISON, Instance, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save

SIZE = BLOCK_BYTES + HEADER_BYTES


@pytest.fixture
def store(library, tmp_path, closed_after):
    return closed_after(SpiedArena(library, tmp_path))


@pytest.fixture
def arena(store, library, tmp_path, closed_after):
    """The same arena, as another process sees it."""
    return closed_after(open_store(f"shm://test?dir={tmp_path}", settings_of()))


def keys_of(p, num_tokens):
    return p.cache.keys(range(num_tokens)).store_keys(p.layout.parts)


def assert_same(p, d, num_tokens):
    """Asserts that D has P's KV in the first tokens, which is all that counts."""
    assert d.tokens(D_BLOCKS)[:num_tokens].equal(p.tokens(P_BLOCKS)[:num_tokens])


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200, 320])
def test_what_p_saves_in_place_d_loads_in_place(instance, store, num_tokens, workers):
    p, d = (instance(fill=f, workers=workers, range_bytes=2 * BLOCK_BYTES) for f in (None, POISON))
    assert save(p, range(num_tokens)) == JobResult(num_tokens)
    assert load(d, range(num_tokens)) == JobResult(num_tokens)
    assert_loaded(p, d, num_tokens)
    assert set(store.calls) == {"fill", "start_scatter", "confirm"}


def test_values_and_their_headers_are_those_of_staging(instance, store, tmp_path):
    """A process that copies by torch, through staging, finds the same bytes in the same arena."""
    p, other = instance(), open_store(f"shm://other?size=8MiB&dir={tmp_path}", settings_of())
    assert sum("pdstore-worker" in t.name for t in threading.enumerate()) == 4, "no call waits"
    save(p, range(200))
    staged = instance(over=other, native="off")
    for mine, theirs in zip(p.caches, staged.caches, strict=True):
        theirs.copy_(mine)
    save(staged, range(200))
    for key in keys_of(p, 200):
        size = HEADER_BYTES + (BLOCK_BYTES if ":partial:" not in key else BLOCK_BYTES // 8)
        assert get(store, [key], [size]) == get(other, [key], [size])
    d = instance(fill=POISON, native="off")
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)
    other.close()


def test_what_d_has_read_is_not_leased_again_when_the_hand_off_ends(
    instance, store, arena, monkeypatch
):
    """D may load while P saves. A busy pool would be full of the leases of what D has already."""
    p, fill = instance(range_bytes=1), store.fill
    keys = p.cache.keys(range(320))
    names = keys.store_keys(p.layout.parts)

    def fill_and_read(batches):
        filled = fill(batches)
        there = [key for batch in batches for key in batch.keys]
        arena.match(there)
        get(arena, there, [SIZE] * len(there))
        return filled

    monkeypatch.setattr(store, "fill", fill_and_read)
    handoff, _ = p.cache.announce(keys)
    plan = SavePlan(keys, handoff=handoff, first_save=PromptSave(0, time.monotonic()))
    begun = p.pool.begin_save(plan, P_BLOCKS)
    begun.layers_done(3)
    assert begun.job.wait(20) == JobResult(320)
    time.sleep(FRESH_S)
    assert arena.oldest_age_s([SIZE] * 1000) is not None, "nothing may go"
    assert arena.match(names) == 5


@pytest.mark.parametrize(
    ("error", "calls"),
    [(StoreTimeout("locked"), [[1] * 5] * 3), (StoreFull("full"), [[1] * 5, *[[1]] * 5])],
)
def test_what_a_call_did_not_store_is_stored_by_more_calls(
    instance, store, monkeypatch, error, calls
):
    """By the same call where the arena's lock was not free in time, else block by block."""
    fill, sizes = store.fill, []
    num_late = len(calls) - 1 if isinstance(error, StoreTimeout) else 1

    def fill_some(batches):
        sizes.append([batch.num_values for batch in batches])
        is_late = len(sizes) <= num_late
        return fill(batches[:1])._replace(error=error) if is_late else fill(batches)

    monkeypatch.setattr(store, "fill", fill_some)
    p, d = instance(range_bytes=1), instance(fill=POISON)
    assert save(p, range(320)) == JobResult(320)
    assert sizes == calls
    assert load(d, range(320)) == JobResult(320)
    assert_loaded(p, d, 320)


def test_what_a_handoff_lost_is_saved_again_range_by_range(instance, store, arena, monkeypatch):
    p = instance(range_bytes=1)
    handoff, _ = p.cache.announce(p.cache.keys(range(320)))
    fill, sizes, leased = store.fill, [], []

    def lose_the_first(batches):
        sizes.append([batch.num_values for batch in batches])
        filled = fill(batches)
        if len(sizes) == 1:
            arena.remove(keys_of(p, 320)[:1])
        return filled

    match = store.match
    monkeypatch.setattr(store, "fill", lose_the_first)
    monkeypatch.setattr(store, "match", lambda keys: leased.append(list(keys)) or match(keys))
    assert save(p, range(320), handoff=handoff).num_tokens == 320
    assert sizes == [[1] * 5, *[[1]] * 5]
    assert [keys_of(p, 320)[4]] in leased, "a range is leased although one before it is lost"


@pytest.mark.parametrize("at", [0, 5, HEADER_BYTES, BLOCK_BYTES])
def test_a_damaged_value_is_a_miss_and_is_removed(instance, arena, at):
    p, d = instance(), instance(fill=POISON)
    save(p, range(200))
    key = keys_of(p, 200)[1]
    place_of(arena, key, SIZE)[at] ^= 1
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert_same(p, d, 64)
    assert arena.match([key]) == 0


def test_a_value_of_another_key_is_never_copied(instance, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    places = [place_of(arena, key, SIZE) for key in keys_of(p, 200)[:2]]
    places[1][:] = places[0]
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.FOREIGN)
    assert (d.tokens(D_BLOCKS)[64:] == POISON).all()


@pytest.mark.parametrize("number", [0, 1])
def test_a_byte_that_another_process_changes_after_the_call_is_not_loaded(
    instance, store, arena, library, number
):
    """The device's copy is held back until the byte has changed."""
    p = instance()
    d = instance(fill=POISON, workers=2, swap=lambda *of: NativeSwap(library, *of))
    save(p, range(128))
    key = keys_of(p, 128)[number]
    value = place_of(arena, key, SIZE)

    def change():
        store.after.clear()
        value[-5] ^= 0x40

    store.after["start_scatter"] = change
    library.delay(300_000)
    assert load(d, range(128)) == JobResult(64 * number, Reason.CORRUPT)
    assert_same(p, d, 64 * number)
    assert arena.match([key]) == 0, "it was still wrong when it was looked at again"


def test_a_byte_that_another_process_changes_while_p_saves_is_not_loaded(
    instance, store, arena, library
):
    """P does not seal it as right. D finds it, and the next save stores the value again."""
    p = instance(swap=lambda *of: NativeSwap(library, *of))
    d = instance(fill=POISON)
    library.change(store.memory())
    assert save(p, range(128)).num_tokens == 128
    assert load(d, range(128)) == JobResult(0, Reason.CORRUPT)
    assert arena.match(keys_of(p, 128)[:1]) == 0
    assert save(p, range(128)) == JobResult(128)
    assert load(d, range(128)) == JobResult(128)
    assert_same(p, d, 128)


def test_a_byte_that_was_wrong_only_while_it_was_copied_leaves_the_value(
    instance, store, arena, library
):
    p = instance()
    d = instance(fill=POISON, swap=lambda *of: NativeSwap(library, *of))
    save(p, range(64))
    value = place_of(arena, keys_of(p, 64)[0], SIZE)

    def flip():
        value[-5] ^= 0x40

    store.before["start_scatter"] = store.before["confirm"] = flip
    assert load(d, range(64)) == JobResult(0, Reason.CORRUPT)
    store.before.clear()
    assert load(d, range(64)) == JobResult(64)
    assert_loaded(p, d, 64)


@pytest.mark.parametrize("before", ["start_scatter", "confirm"])
def test_memory_that_another_value_took_over_does_not_count_and_is_not_removed(
    instance, store, arena, caplog, before
):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(64))
    others = [name for n in range(100) for name in keys_of(p, 64 * (n + 2))[-1:]]

    def replace():
        store.before.clear()
        arena.remove(keys_of(p, 64))
        for other in others:
            put(arena, [other], [b"\xee" * SIZE])

    store.before[before] = replace
    result = d.pool.load(d.cache.keys(range(64)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.LOST)
    assert "is removed" not in caplog.text


def test_a_full_arena_ends_the_save_and_says_how_much_is_durable(tmp_path, library, closed_after):
    url = f"shm://small?size=1MiB&dir={tmp_path}&lease=600"
    arena = closed_after(open_store(url, settings_of()))
    metrics = Metrics()
    p = closed_after(Instance(GuardedStore(arena, metrics), num_blocks=200))
    job = p.pool.save(p.cache.keys(range(3000)), list(range(190)))
    result = job.wait(10)
    assert result.reason is Reason.STORE_FULL
    assert 0 < result.num_tokens < 3000
    assert get(arena, p.cache.keys(range(64)).store_keys(p.layout.parts), [SIZE])
    assert arena.counts().reserved == 0
    full = {"verb": "put", "outcome": "StoreFull"}
    assert metrics.registry.get_sample_value("pdstore_store_calls_total", full) >= 1


def test_a_cancelled_save_gives_its_places_back(instance, arena):
    class Event:
        reached, fired = threading.Event(), threading.Event()

        def synchronize(self):
            self.reached.set()
            assert self.fired.wait(10)

        def query(self):
            return self.fired.is_set()

    p, event = instance(), Event()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS, ready=event)
    assert event.reached.wait(10)
    job.cancel()
    event.fired.set()
    p.pool.close()
    assert job.result.reason is Reason.CANCELLED
    assert arena.counts().reserved == 0
