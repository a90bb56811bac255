"""Pipeline stages, each with a pool of its own: the hand-off is complete when all have stored."""

from __future__ import annotations

import itertools

import pytest
import torch

from pdstore import LayerSpec
from pdstore.errors import Reason
from pdstore.format.layout import Pipeline
from pdstore.format.plan import SavePlan
from tests.support.kv import POISON, eventually
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS

LAYERS = (LayerSpec(2, 8), LayerSpec(2, 8), LayerSpec.latent(24)) * 2
NUM_TOKENS = 200
KEPT = {"layer_ranges": 2, "layers": LAYERS}


@pytest.fixture
def stages(instance):
    """Makes the ranks of an instance with some layers in each stage."""

    def make(counts, **more):
        stage_of = tuple(itertools.chain(*([n] * count for n, count in enumerate(counts))))
        return [
            instance(pipeline=Pipeline(stage_of, n), **KEPT, **more) for n in range(len(counts))
        ]

    return make


def caches_of(ranks):
    """The caches of all layers, whichever stage holds them."""
    return [cache for rank in ranks for cache in rank.caches]


def assert_same_tokens(d, p, num_tokens=NUM_TOKENS):
    for got, want in zip(caches_of(d), caches_of(p), strict=True):
        got, want = got[D_BLOCKS].flatten(0, 1), want[P_BLOCKS].flatten(0, 1)
        assert torch.equal(got[:num_tokens], want[:num_tokens])
        assert (got[num_tokens:] == POISON).all()


def publish(rank, handoff):
    keys = rank.cache.keys(range(NUM_TOKENS))
    return rank.pool.save(keys, P_BLOCKS, handoff=handoff).wait(10)


@pytest.mark.parametrize(
    ("of_p", "of_d"), [((3, 3), (6,)), ((6,), (3, 3)), ((3, 3), (3, 3))], ids=str
)
@pytest.mark.parametrize("native", ["auto", "off"])
def test_p_and_d_of_any_stages_hand_over(stages, of_p, of_d, native):
    p, d = stages(of_p, native=native), stages(of_d, fill=POISON, native=native)
    handoff, params = p[0].cache.announce(p[0].cache.keys(range(NUM_TOKENS)))
    assert all(publish(rank, handoff).reason is None for rank in p)
    found = d[0].cache.lookup(d[0].cache.keys(range(NUM_TOKENS)), params).wait(10)
    assert (found.num_tokens, found.reason) == (NUM_TOKENS, None)
    for rank in d:
        assert rank.pool.load(found.keys, D_BLOCKS).wait(10).num_tokens == NUM_TOKENS
    assert_same_tokens(d, p)


def lookup(d, params):
    return d.cache.lookup(d.cache.keys(range(NUM_TOKENS)), params)


def test_d_waits_until_the_last_stage_has_stored(stages):
    first, last = stages((3, 3))
    [d] = stages((6,))
    handoff, params = first.cache.announce(first.cache.keys(range(NUM_TOKENS)))
    assert publish(last, handoff).reason is None
    waiting = lookup(d, params)
    assert d.store.match([handoff.done(d.namespace, 0)]) == 0
    assert waiting.poll() is None
    assert publish(first, handoff).reason is None
    assert waiting.wait(10).num_tokens == NUM_TOKENS


def test_without_a_stages_last_values_d_has_the_blocks_that_are_whole(stages):
    """The stage has died: what it stored before counts, and the rest is a miss with a reason."""
    p = first, last = stages((3, 3))
    d = [alone] = stages((6,), fill=POISON, handoff_wait_s=0.5)
    handoff, params = first.cache.announce(first.cache.keys(range(NUM_TOKENS)))
    assert publish(first, handoff).reason is None
    last.pool.save(last.cache.keys(range(NUM_TOKENS)).prefix(128), P_BLOCKS).wait(10)
    found = lookup(alone, params).wait(10)
    assert (found.num_tokens, found.reason) == (128, Reason.HANDOFF_LATE)
    assert alone.pool.load(found.keys, D_BLOCKS).wait(10).num_tokens == 128
    assert_same_tokens(d, p, 128)


def test_a_stage_saves_its_ranges_while_it_computes_its_later_layers(instance):
    pipeline = Pipeline((0, 0, 1, 1, 1, 1), stage=1)
    p = instance(layer_ranges=3, layers=LAYERS, pipeline=pipeline, workers=4, range_bytes=1)
    keys = p.cache.keys(range(NUM_TOKENS))
    early = p.layout.parts_of[1]
    save = p.pool.begin_save(SavePlan(keys), P_BLOCKS)
    save.layers_done(2)
    eventually(lambda: p.store.match(keys.store_keys(early)) == len(early) * len(keys))
    assert not save.job.done
    save.layers_done(4)
    assert save.job.wait(10).num_tokens == NUM_TOKENS
