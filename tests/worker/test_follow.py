"""Following loads: blocks are loaded as P stores them, and every end is bounded by progress."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdstore import HandoffId, JobResult, LayerSpec
from pdstore.errors import Direction, Reason, StoreTimeout, StoreUnavailable
from pdstore.format.plan import SavePlan
from pdstore.store import open_store
from pdstore.store.transfer import Split
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import get, put
from pdstore.worker.follow import Follow
from pdstore.worker.job import Job
from pdstore.worker.load import LoadWork
from pdstore.worker.values import PromptBlocks
from tests.support.clock import Clock
from tests.support.kv import BLOCK_BYTES, POISON, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded

LAYERS = (LayerSpec(2, 8),) * 6
ONE = HandoffId("1" * 32)


@pytest.fixture(params=["memory", "arena", "tiers"])
def store(request, tmp_path):
    arena = f"shm://test?size=8MiB&dir={tmp_path}"
    urls = {"memory": "memory://", "arena": arena, "tiers": f"{arena} file://{tmp_path}/below"}
    store = open_store(urls[request.param], settings_of())
    yield store
    store.close()


@pytest.fixture
def p(instance):
    return instance(layers=LAYERS, layer_ranges=3, range_bytes=1)


@pytest.fixture
def d(instance):
    return instance(layers=LAYERS, layer_ranges=3, fill=POISON, range_bytes=BLOCK_BYTES)


def follow(d, num_tokens, **more):
    return d.pool.load(d.cache.keys(range(num_tokens)), D_BLOCKS, follow=ONE, **more)


def is_loaded(p, d, num_tokens, layer) -> bool:
    got, want = d.tokens(D_BLOCKS, layer), p.tokens(P_BLOCKS, layer)
    return torch.equal(got[:num_tokens], want[:num_tokens])


def test_layers_are_loaded_while_p_still_computes_others(p, d):
    job = follow(d, 200)
    save = p.pool.begin_save(SavePlan(p.cache.keys(range(200)), handoff=ONE), P_BLOCKS)
    for layer in range(6):
        assert not job.done
        save.layers_done(layer + 1)
        if layer % 2:
            eventually(lambda layer=layer: is_loaded(p, d, 200, layer))
    assert job.wait(10) == JobResult(200)
    assert_loaded(p, d, 200)


def test_no_token_counts_before_all_its_layers_are_loaded(p, d):
    job = follow(d, 200)
    save = p.pool.begin_save(SavePlan(p.cache.keys(range(200)), handoff=ONE), P_BLOCKS)
    save.layers_done(4)
    eventually(lambda: is_loaded(p, d, 200, 3))
    job.cancel()
    assert job.wait(10) == JobResult(0, Reason.CANCELLED, job.result.error)
    save.layers_done(6)


def test_a_handoff_that_fails_ends_the_load_with_what_is_whole(p, d):
    job = follow(d, 200)
    assert p.pool.save(p.cache.keys(range(128)), P_BLOCKS).wait(10).reason is None
    p.pool.abort_handoff(ONE)
    assert job.wait(10) == JobResult(128, Reason.HANDOFF_FAILED)
    assert_loaded(p, d, 128)


@pytest.mark.parametrize("is_purged", [True, False])
def test_a_purged_handoff_is_told_from_a_p_that_died(p, instance, store, is_purged):
    d = instance(layers=LAYERS, layer_ranges=3, fill=POISON, handoff_wait_s=9.0)
    keys = p.cache.keys(range(200))
    handoff, params = p.cache.announce(keys)
    if is_purged:
        assert p.pool.save(keys, P_BLOCKS, handoff=handoff).wait(10).reason is None
        assert p.cache.clear()
    else:
        assert p.pool.save(keys.prefix(128), P_BLOCKS).wait(10).reason is None
    found = d.cache.follow(d.cache.keys(range(200)), params).wait(10)
    load = d.pool.load(found.keys, D_BLOCKS, follow=found.follow)
    reason = Reason.HANDOFF_GONE if is_purged else Reason.HANDOFF_DEAD
    assert load.wait(10) == JobResult(0 if is_purged else 128, reason)
    assert d.cache.lookup(d.cache.keys(range(200)), params).wait(10).reason is reason


def test_a_load_ends_when_nothing_more_is_stored(p, instance):
    d = instance(layers=LAYERS, layer_ranges=3, fill=POISON, handoff_wait_s=1.0)
    job, keys, saved = follow(d, 200), p.cache.keys(range(200)), 0
    for end in (64, 128):  # together longer than the wait
        with pytest.raises(TimeoutError):
            job.wait(0.6)
        part = keys.prefix(end)
        assert p.pool.save(part, P_BLOCKS, first_token=saved).wait(10).reason is None
        saved = end
    assert job.wait(10) == JobResult(128, Reason.HANDOFF_LATE)
    assert_loaded(p, d, 128)


def test_a_damaged_layer_range_ends_the_load_before_its_block(p, d, store):
    keys = p.cache.keys(range(200))
    p.pool.save(keys, P_BLOCKS).wait(10)
    part = p.layout.parts_of[1][0]
    key = keys.store_keys([part])[2]
    store.remove([key])
    other = p.cache.keys([9] * 200).store_keys([part])[2]
    p.pool.save(p.cache.keys([9] * 200), P_BLOCKS).wait(10)
    move(store, other, key, BLOCK_BYTES * 2 // 3 + 64)
    result = follow(d, 200).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.FOREIGN)


def test_blocks_are_loaded_in_shares_and_one_by_one_at_the_end(p, d):
    """Each step costs the engine time; a request waits for the last blocks of the last layers."""
    keys, clock = d.cache.keys(range(12 * 64)), Clock()
    prompt = PromptBlocks(d.layout, keys, [range(48)])
    split = Split(3 * prompt.values_from(0, 0).sizes[0])
    work = LoadWork(SimpleNamespace(transfer=SimpleNamespace(split=split)), prompt, 0, None)
    store = open_store("memory://", settings_of())
    job = Job(Direction.LOAD, work, timeout_s=60)
    waiter = Follow(store, job, work, ONE, block_timeout_s=9.0, wake=lambda: None, clock=clock)
    first, middle, last = (keys.store_keys(d.layout.parts_of[n]) for n in range(3))

    def wanted_after(*stored):
        put(store, stored, [b"x" * 64] * len(stored))
        waiter.on_search(set(stored), clock.now)
        return waiter.wanted()[2:5]

    assert wanted_after(*first[:3]) == [first[3], middle[3], last[3]]
    assert wanted_after(first[3]) == [first[7], middle[3], last[3]]
    assert wanted_after(*first[4:8]) == [first[11], middle[3], last[3]]
    assert wanted_after(*last[:4]) == [first[11], middle[3], last[7]]
    assert wanted_after(*last[4:8]) == [first[11], middle[3], last[8]]
    assert wanted_after(last[8]) == [first[11], middle[3], last[9]]
    clock.now += 0.2
    assert wanted_after() == [first[8], middle[0], last[9]], "P is slow"
    assert wanted_after(first[8]) == [first[11], middle[0], last[9]]
    clock.now += 10.0
    assert wanted_after() == [first[9], middle[0], last[9]]
    assert not waiter.is_over, "the blocks behind may be there"
    wanted_after()
    assert waiter.is_over


def test_a_large_state_makes_no_small_shares_of_the_tokens_before_it(instance):
    """The state at a hand-off's end is larger than a share; each load costs the engine time."""
    layers = (LayerSpec(2, 8), LayerSpec.state(20 * BLOCK_BYTES, "ssm", table=1))
    d = instance(layers=layers, boundary_tokens=64, num_blocks=(64, 24))
    keys, clock = d.cache.keys(range(24 * 64)), Clock()
    prompt = PromptBlocks(d.layout, keys, [range(96), {24 * 64: 1}])
    sizes = prompt.values_from(0, 0).sizes
    split = Split(4 * sizes[0], 1)
    assert sizes[-1] > split.range_bytes
    released = []
    work = LoadWork(SimpleNamespace(transfer=SimpleNamespace(split=split)), prompt, 0, None)
    work.release = lambda ranges, layer_range: released.extend(ranges)
    store = open_store("memory://", settings_of())
    job = Job(Direction.LOAD, work, timeout_s=60)
    waiter = Follow(store, job, work, ONE, block_timeout_s=9.0, wake=lambda: None, clock=clock)
    for key in prompt.values_from(0, 0).keys:
        put(store, [key], [b"x" * 64])
        if key in waiter.wanted():
            waiter.on_search({key}, clock.now)
    assert [(blocks.first, blocks.stop) for blocks in released[:4]] == [
        (first, first + 5) for first in range(0, 20, 5)
    ]
    assert len(released) == 8, "24 blocks were released one by one, for the state behind them"


def move(store, source, target, size):
    assert put(store, [target], get(store, [source], [size])) == 1


def test_a_load_goes_on_after_the_store_was_away(p, instance, store):
    class Away(WrapperStore):
        is_away, num_asked = True, 0

        def match(self, keys):
            if self.is_away:
                self.num_asked += 1
                raise StoreUnavailable("on purpose")
            return super().match(keys)

    away = Away(store)
    d = instance(layers=LAYERS, layer_ranges=3, fill=POISON, over=away)
    job = follow(d, 200)
    p.pool.save(p.cache.keys(range(200)), P_BLOCKS).wait(10)
    eventually(lambda: away.num_asked > 1)
    assert not job.done
    away.is_away = False
    assert job.wait(10) == JobResult(200)
    assert_loaded(p, d, 200)


def test_a_load_ends_when_a_search_times_out_with_what_is_whole(p, instance, store):
    class Slow(WrapperStore):
        is_slow = False

        def match(self, keys):
            if self.is_slow:
                raise StoreTimeout("on purpose")
            return super().match(keys)

    slow = Slow(store)
    d = instance(layers=LAYERS, layer_ranges=3, fill=POISON, over=slow, handoff_wait_s=60.0)
    p.pool.save(p.cache.keys(range(128)), P_BLOCKS).wait(10)
    job = follow(d, 200)
    eventually(lambda: is_loaded(p, d, 128, 5))
    slow.is_slow = True
    assert job.wait(10) == JobResult(128, Reason.STORE_SLOW)
    assert_loaded(p, d, 128)


class Failing(WrapperStore):
    """Fails a match or a get of some keys."""

    def __init__(self, inner):
        super().__init__(inner)
        self.keys: set[str] = set()

    def match(self, keys):
        self._check(keys)
        return super().match(keys)

    def get(self, keys, slots):
        self._check(keys)
        return super().get(keys, slots)

    def _check(self, keys):
        if not self.keys.isdisjoint(keys):
            raise StoreUnavailable("on purpose")
