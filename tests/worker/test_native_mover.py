"""NativeMover: a share in one call of the library; what that cannot do is done step by step."""

from __future__ import annotations

import pytest

from pdstore import JobResult, LayerSpec
from pdstore.format import block
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.store import open_store
from pdstore.store.circuit_breaker import CircuitBreaker
from pdstore.store.in_place import Filled, NativeInPlace
from pdstore.store.instrumented import Instrumented
from pdstore.worker import values
from pdstore.worker.swap.native import NativeSwap
from tests.support.kv import BLOCK_BYTES, POISON, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save

STEPS = ("reserve", "borrow")
CALLS = ("fill", "take")


class Spied(NativeInPlace):
    """Passes every call to an arena, notes it, and can do something before or after it."""

    def __init__(self, arena):
        self._arena = arena
        self.calls: list[str] = []
        self.before = dict.fromkeys(("fill", "take", "still_there"), lambda: None)
        self.after_take = lambda: None

    def __getattr__(self, name):
        return getattr(self._arena, name)

    @property
    def span_bytes(self):
        return self._arena.span_bytes

    def _call(self, name, *args):
        self.calls.append(name)
        self.before.get(name, lambda: None)()
        return getattr(self._arena, name)(*args)

    def memory(self):
        return self._arena.memory()

    def reserve(self, keys, sizes):
        return self._call("reserve", keys, sizes)

    def publish(self, reservation, count):
        return self._call("publish", reservation, count)

    def abandon(self, reservation):
        self._call("abandon", reservation)

    def borrow(self, keys, sizes):
        return self._call("borrow", keys, sizes)

    def still_there(self, loan):
        return self._call("still_there", loan)

    def release(self, loan):
        self._call("release", loan)

    def fill(self, kinds, batches, rest_s=0.0):
        return self._call("fill", kinds, batches, rest_s)

    def take(self, batch):
        taken = self._call("take", batch)
        self.after_take()
        return taken


@pytest.fixture
def store(arena):
    return Spied(arena)


def keys_of(p, num_tokens):
    return p.cache.keys(range(num_tokens)).store_keys(p.layout.parts)


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200, 320])
def test_a_prompt_goes_and_comes_without_a_single_step(instance, store, num_tokens, workers):
    p, d = (instance(fill=f, workers=workers, range_bytes=2 * BLOCK_BYTES) for f in (None, POISON))
    assert save(p, range(num_tokens)) == JobResult(num_tokens)
    assert load(d, range(num_tokens)) == JobResult(num_tokens)
    assert_loaded(p, d, num_tokens)
    assert not set(STEPS) & set(store.calls)
    assert "fill" in store.calls
    assert not {"publish", "abandon"} & set(store.calls), "what is filled is published"
    assert store.calls.count("take") == store.calls.count("release")


AT_ONCE = "pdstore.worker.block_range.RANGES_AT_ONCE"


def test_ranges_are_stored_in_few_calls_and_counted_once(instance, store, monkeypatch):
    monkeypatch.setattr(AT_ONCE, 3)
    p = instance(range_bytes=1, layer_ranges=2)
    assert save(p, range(64)).num_tokens == 64
    calls = store.calls.count("fill")
    assert save(p, range(320)).num_tokens == 320
    assert store.calls.count("fill") - calls == 2, "five ranges, of which one is stored"
    assert saved_tokens(p) == 320


def saved_tokens(p):
    return p.pool.metrics.registry.get_sample_value("pdstore_tokens_total", {"verb": "saved"})


def test_a_call_that_stores_the_first_ranges_leaves_the_others_to_the_steps(instance, store):
    fill = store.fill

    def fill_first(kinds, batches, rest_s=0.0):
        indices, num_bytes, _ = fill(kinds[: batches[0].num_values], batches[:1])
        return Filled(indices, num_bytes, is_whole=False)

    store.fill = fill_first
    p, d = instance(range_bytes=1), instance(fill=POISON)
    assert save(p, range(320)) == JobResult(320)
    assert "reserve" in store.calls
    assert saved_tokens(p) == 320
    assert load(d, range(320)) == JobResult(320)
    assert_loaded(p, d, 320)


def test_what_a_handoff_lost_is_saved_again_range_by_range(instance, store, arena):
    p = instance(range_bytes=1)
    handoff, _ = p.cache.announce(p.cache.keys(range(320)))
    fill, sizes, leased = store.fill, [], []

    def lose_the_first(kinds, batches, rest_s=0.0):
        sizes.append([batch.num_values for batch in batches])
        filled = fill(kinds, batches)
        if len(sizes) == 1:
            arena.remove(keys_of(p, 320)[:1])
        return filled

    store.fill, match = lose_the_first, arena.match
    arena.match = lambda keys: leased.append(list(keys)) or match(keys)
    assert save(p, range(320), handoff=handoff).num_tokens == 320
    assert sizes == [[1] * 5, *[[1]] * 5]
    assert [keys_of(p, 320)[4]] in leased, "a range is leased although one before it is lost"


def test_a_worker_rests_after_the_last_shares_of_a_handoff_alone(instance, store, monkeypatch):
    """Before that other shares wait for it; then P is about to answer."""
    monkeypatch.setattr(AT_ONCE, 1)
    rests, fill = [], store.fill

    def noted(kinds, batches, rest_s=0.0):
        rests.append(rest_s)
        return fill(kinds, batches, rest_s)

    store.fill = noted
    p = instance(workers=2, range_bytes=1)
    assert save(p, range(1000, 1320)).num_tokens == 320
    assert not any(rests), "nobody waits for this one"
    handoff, _ = p.cache.announce(p.cache.keys(range(320)))
    assert save(p, range(320), handoff=handoff).num_tokens == 320
    assert rests[len(rests) // 2] == 0.0
    assert 0.0 < rests[-1] <= 0.01


def test_no_value_of_a_full_block_is_made_for_a_load(instance, monkeypatch):
    p, d = (instance(fill=fill, layer_ranges=2) for fill in (None, POISON))
    save(p, range(320))
    made = []
    monkeypatch.setattr(values, "Value", lambda *fields: made.append(fields))
    assert load(d, range(320)) == JobResult(320)
    assert made == []
    assert_loaded(p, d, 320)


def test_bytes_are_counted_whichever_way_they_go(instance, arena):
    metrics = Metrics()
    p = instance(over=Instrumented(CircuitBreaker(arena), metrics), workers=2)
    assert save(p, range(200)) == JobResult(200)
    assert load(p, range(200)) == JobResult(200)
    value = metrics.registry.get_sample_value
    saved, loaded = (value("pdstore_bytes_total", {"direction": way}) for way in ("save", "load"))
    assert saved == loaded > 3 * BLOCK_BYTES


def test_values_and_their_headers_are_those_of_the_steps(instance, arena, tmp_path):
    """A process that reads step by step finds the same bytes, whichever way they were stored."""
    p, steps = instance(), open_store(f"shm://other?size=8MiB&dir={tmp_path}", settings_of())
    save(p, range(200))
    other = instance(over=steps, native="off")
    for mine, theirs in zip(p.caches, other.caches, strict=True):
        theirs.copy_(mine)
    save(other, range(200))
    for key in keys_of(p, 200):
        size = block.HEADER_BYTES + (BLOCK_BYTES if ":partial:" not in key else BLOCK_BYTES // 8)
        a, b = (store.borrow([key], [size]).places.value(0) for store in (arena, steps))
        assert bytes(a) == bytes(b)
    steps.close()


def test_parts_of_two_groups_and_shards_and_a_first_token_come_back(instance):
    layers = (LayerSpec(2, 8), LayerSpec(2, 8, kind="sliding", window=64))
    p, d = (instance(fill=f, kv_shards=2, layers=layers) for f in (None, POISON))
    assert save(p, range(200)).num_tokens == 200
    job = d.pool.load(d.cache.keys(range(200)), D_BLOCKS, first_token=80)
    assert job.wait(10).num_tokens == 200
    there = p.tokens(P_BLOCKS)[80:200]
    assert d.tokens(D_BLOCKS)[80:200].equal(there)
    assert (d.tokens(D_BLOCKS)[:80] == POISON).all()


def test_what_is_stored_is_not_copied_again(instance, store):
    first, second = instance(), instance()
    save(first, range(200))
    attempt, _ = second.cache.announce(second.cache.keys(range(200)))
    assert save(second, range(200), handoff=attempt).num_tokens == 200
    assert not set(STEPS) & set(store.calls)


def test_a_value_that_is_damaged_is_found_step_by_step_and_removed(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    key = keys_of(p, 200)[1]
    size = block.HEADER_BYTES + BLOCK_BYTES
    arena.borrow([key], [size]).places.value(0)[100] ^= 1
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert "borrow" in store.calls
    assert arena.match([key]) == 0
    assert_same(p, d, 64)


def assert_same(p, d, num_tokens):
    """Asserts that D has P's KV in the first tokens, which is all that counts."""
    assert d.tokens(D_BLOCKS)[:num_tokens].equal(p.tokens(P_BLOCKS)[:num_tokens])


@pytest.mark.parametrize("number", [0, 1])
def test_a_byte_that_another_process_changes_after_the_call_is_not_loaded(
    instance, store, arena, library, number
):
    """The device's copy is held back until the byte has changed."""
    p = instance()
    d = instance(fill=POISON, workers=2, swap=lambda *of: NativeSwap(library, *of))
    save(p, range(128))
    size = block.HEADER_BYTES + BLOCK_BYTES
    key = keys_of(p, 128)[number]
    value = arena.borrow([key], [size]).places.value(0)

    def change():
        store.after_take = lambda: None
        value[-5] ^= 0x40

    store.after_take = change
    library.delay(300_000)
    assert load(d, range(128)) == JobResult(64 * number, Reason.CORRUPT)
    assert_same(p, d, 64 * number)
    assert arena.match([key]) == 0, "it was still wrong when it was looked at again"


def test_a_byte_that_was_wrong_only_while_it_was_copied_leaves_the_value(
    instance, store, arena, library
):
    p = instance()
    d = instance(fill=POISON, swap=lambda *of: NativeSwap(library, *of))
    save(p, range(64))
    size = block.HEADER_BYTES + BLOCK_BYTES
    value = arena.borrow(keys_of(p, 64), [size]).places.value(0)

    def flip():
        value[-5] ^= 0x40

    store.before["take"] = store.before["still_there"] = flip
    assert load(d, range(64)) == JobResult(0, Reason.CORRUPT)
    store.before["take"] = store.before["still_there"] = lambda: None
    assert load(d, range(64)) == JobResult(64)
    assert_loaded(p, d, 64)


def test_a_value_of_another_key_is_never_copied(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    first, second = keys_of(p, 200)[:2]
    size = block.HEADER_BYTES + BLOCK_BYTES
    places = [arena.borrow([key], [size]).places.value(0) for key in (first, second)]
    places[1][:] = places[0]
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.FOREIGN)
    assert (d.tokens(D_BLOCKS)[64:] == POISON).all()


def test_a_value_that_is_missing_leaves_those_before_it(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    arena.remove([keys_of(p, 200)[2]])
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.LOST)
    assert_loaded(p, d, 128)


def test_a_value_that_went_away_during_the_copy_does_not_count(instance, store, arena):
    p, d = instance(), instance(fill=POISON, workers=2)
    save(p, range(200))
    store.before["still_there"] = lambda: arena.remove([keys_of(p, 200)[1]])
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (64, Reason.LOST)


def test_an_arena_without_room_for_all_takes_what_fits(instance, tmp_path, library):
    small = open_store(f"shm://small?size=128KiB&slab=64KiB&dir={tmp_path}", settings_of())
    p = instance(over=Spied(small))
    result = save(p, range(320))
    assert result.reason is Reason.STORE_FULL
    assert small.counts().reserved == 0
    assert 0 < small.match(keys_of(p, 320)) < 5
    p.close()
    small.close()


def test_a_load_that_is_cancelled_in_the_call_ends_after_its_copies(instance, store):
    p, d = instance(), instance(fill=POISON)
    save(p, range(200))
    jobs = []
    store.before["take"] = lambda: eventually(lambda: jobs)
    store.after_take = lambda: jobs[0].cancel()
    jobs.append(d.pool.load(d.cache.keys(range(200)), D_BLOCKS))
    assert jobs[0].wait(10).reason is Reason.CANCELLED
    eventually(lambda: store.calls.count("release") == store.calls.count("take"))


def test_a_save_that_is_cancelled_in_a_call_begins_no_other(instance, store, arena, monkeypatch):
    """The share that is being copied is stored: its blocks are held until the end of the call."""
    monkeypatch.setattr(AT_ONCE, 1)
    p, jobs = instance(workers=2, range_bytes=1), []

    def cancel():
        eventually(lambda: jobs)
        jobs[0].cancel()

    store.before["fill"] = cancel
    jobs.append(p.pool.save(p.cache.keys(range(200)), P_BLOCKS))
    assert jobs[0].wait(10).reason is Reason.CANCELLED
    assert store.calls.count("fill") == 1
    assert arena.counts().reserved == 0
    assert 0 < arena.match(keys_of(p, 200)) < len(keys_of(p, 200))
