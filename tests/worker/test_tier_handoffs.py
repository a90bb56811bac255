"""KVPool over tiers: a hand-off is whole in the first one; a load tells what it has read where."""

from __future__ import annotations

import pytest

from pdstore import HandoffId, JobResult
from pdstore.errors import Reason
from pdstore.format.plan import PromptSave, SavePlan
from pdstore.store.memory import MemoryStore
from pdstore.store.tiers.store import TieredStore
from pdstore.store.wrappers import WrapperStore
from tests.support.kv import BLOCK_BYTES, POISON
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save
from tests.worker.test_tiers import (
    NUM_TOKENS,
    PREFIX,
    PROMPT,
    saved,
)
from tests.worker.test_tiers import arena as arena
from tests.worker.test_tiers import d as d
from tests.worker.test_tiers import files as files
from tests.worker.test_tiers import p as p
from tests.worker.test_tiers import prefix as prefix
from tests.worker.test_tiers import store as store


@pytest.mark.parametrize("num_gone", [1, 3], ids=["partly", "all of it"])
def test_a_hand_off_is_whole_in_the_first_tier_before_p_is_done(
    p, instance, arena, prefix, num_gone
):
    """P has loaded the prefix, so its save begins behind it; D has no tier below."""
    d = instance(over=arena, fill=POISON)
    arena.remove(prefix[-num_gone:])
    keys = p.cache.keys(PROMPT)
    handoff, _ = p.cache.announce(keys)
    assert p.pool.save(keys, P_BLOCKS, first_token=192, handoff=handoff).wait(10).reason is None
    assert d.cache.match(d.cache.keys(PROMPT)).num_tokens == 292
    assert load(d, PROMPT) == JobResult(292)
    assert_loaded(p, d, 292)


def test_a_hand_off_over_tiers_leases_only_what_d_has_not_read(instance, closed_after):
    first = Renewing(MemoryStore())
    p = instance(over=closed_after(TieredStore([first, MemoryStore()])))
    keys = p.cache.keys(PROMPT)
    handoff, _ = p.cache.announce(keys)
    plan = SavePlan(keys, handoff=handoff, first_save=PromptSave(64, 17.5))
    begun = p.pool.begin_save(plan, P_BLOCKS)
    begun.layers_done(len(p.caches))
    assert begun.job.wait(10) == JobResult(292)
    assert (1, 17.5) in first.renewed, "of the first block, nobody knows when it was saved"


class Renewing(WrapperStore):
    """Notes the renewals."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.renewed = []

    def renew(self, keys, first, since):
        self.renewed.append((first, since))
        return self.match(keys)


def test_a_part_of_a_hand_off_goes_up_before_the_rest_is_saved(p, arena, prefix):
    arena.remove(prefix)
    begun = p.pool.begin_save(SavePlan(p.cache.keys(PREFIX), is_awaited=True), P_BLOCKS)
    begun.layers_done(len(p.caches))
    assert begun.job.wait(10) == JobResult(192)
    assert arena.match(prefix) == 3


def test_a_save_that_nobody_waits_for_leaves_below_what_is_there(p, arena, files, prefix):
    arena.remove(prefix)
    assert save(p, PREFIX) == JobResult(192)
    assert arena.which_stored(prefix) == [False] * 3


def test_d_that_follows_asks_the_first_tier_alone(p, instance, arena, closed_after):
    below = Counted(MemoryStore())
    d = instance(over=closed_after(TieredStore([arena, below])), fill=POISON)
    below.asked.clear()
    handoff = HandoffId("1" * 32)
    job = d.pool.load(d.cache.keys(PROMPT), D_BLOCKS, follow=handoff)
    begun = p.pool.begin_save(SavePlan(p.cache.keys(PROMPT), handoff=handoff), P_BLOCKS)
    begun.layers_done(len(p.caches))
    assert begun.job.wait(10) == JobResult(292)
    assert job.wait(10) == JobResult(292)
    assert_loaded(p, d, 292)
    assert below.asked == []


class Counted(WrapperStore):
    """Notes every search."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.asked = []

    def match(self, keys):
        self.asked.append([*keys])
        return super().match(keys)

    def which_stored(self, keys):
        self.asked.append([*keys])
        return self.wrapped.which_stored(keys)


@pytest.mark.parametrize("changes", [{}, {"native": "off"}, {"layer_ranges": 3}])
@pytest.mark.parametrize(
    ("gone", "first_token", "by_tier"),
    [
        ([], 0, {0: 320}),
        ([0, 1, 2, 3, 4], 0, {1: 320}),
        ([1, 3], 0, {0: 192, 1: 128}),
        ([0, 1], 80, {0: 192, 1: 48}),
    ],
)
def test_a_load_tells_from_which_tiers_it_has_read(
    instance, store, arena, gone, first_token, by_tier, changes
):
    p, d = (instance(fill=fill, range_bytes=2 * BLOCK_BYTES, **changes) for fill in (None, POISON))
    keys = saved(p, store)
    num_parts = len(p.layout.parts)
    arena.remove([key for i in gone for key in keys[i * num_parts :][:num_parts]])
    job = d.pool.load(d.cache.keys(range(NUM_TOKENS)), D_BLOCKS, first_token=first_token)
    assert job.wait(10) == JobResult(NUM_TOKENS)
    assert job.by_tier == by_tier


def test_a_load_that_falls_short_tells_only_of_what_counts(p, d, store, arena, files):
    keys = saved(p, store)
    arena.remove([keys[0], keys[3]])
    files.remove(keys[3:])
    job = d.pool.load(d.cache.keys(range(NUM_TOKENS)), D_BLOCKS)
    assert job.wait(10) == JobResult(192, Reason.LOST)
    assert job.by_tier == {0: 128, 1: 64}


def test_without_tiers_a_load_tells_nothing_of_them(instance, arena):
    p, d = (instance(over=arena, fill=fill) for fill in (None, POISON))
    save(p, range(NUM_TOKENS))
    job = d.pool.load(d.cache.keys(range(NUM_TOKENS)), D_BLOCKS)
    assert job.wait(10) == JobResult(NUM_TOKENS)
    assert job.by_tier == {}
