"""Saves: what a step computes is saved from vLLM's blocks, which are held until it is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore.adapters.vllm.scheduler import Saves
from pdstore.engine.request import EngineRequest
from pdstore.format.layout import NO_BLOCK
from tests.adapters.vllm.standins import BlockPool
from tests.support.instances import instance as instance
from tests.support.kv import settings_of

BLOCK, PROMPT = 64, list(range(1, 301))
TABLE = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.fixture
def pool():
    return BlockPool()


@pytest.fixture
def asked():
    """vLLM's request of the prompt."""
    tokens = [*PROMPT, *range(1000, 1200)]
    return SimpleNamespace(num_computed_tokens=0, num_tokens=len(PROMPT), all_token_ids=tokens)


@pytest.fixture
def state_of(instance):
    def make(handoff=None, **settings):
        cache = instance().cache
        settings = settings_of(**settings)
        state = EngineRequest(cache, settings, cache.keys(PROMPT), id="r", may_load=False)
        state.handoff = handoff
        return state

    return make


def saves_of(pool, num_ranks=1, table=TABLE):
    saves = Saves(num_ranks, pool, BLOCK)
    ids = SimpleNamespace(get_block_ids={"r": [table]}.get)
    saves.begin_step(SimpleNamespace(kv_connector_block_state=ids))
    return saves


def compute(saves, state, asked, *chunks):
    """The saves of a request that is computed in these chunks."""
    specs = []
    for num_tokens in chunks:
        specs += saves.plan(state, asked, num_tokens)
        asked.num_computed_tokens += num_tokens
    return specs


def test_blocks_that_a_window_has_left_are_no_blocks(pool, state_of, asked):
    saves = saves_of(pool, table=[0, 0, *TABLE])
    [save] = compute(saves, state_of(), asked, 300)
    assert list(save.block_ids[0]) == [NO_BLOCK, NO_BLOCK, *TABLE[:3]]
    assert pool.held == TABLE[:3]


def test_a_save_holds_its_new_blocks_until_every_rank_has_read_them(pool, state_of, asked):
    saves = saves_of(pool, num_ranks=2)
    [first, second] = compute(saves, state_of(), asked, 128, 128)
    assert pool.held == TABLE[:2] + TABLE[2:4]
    saves.release_blocks({first.number: 1})
    assert pool.held == TABLE[:4]
    saves.release_blocks({first.number: 1, 99: 1})
    assert pool.held == TABLE[2:4]
    saves.release_blocks({second.number: 2})
    assert pool.held == []
    assert len(saves) == 0


def test_a_token_that_a_draft_may_take_back_is_not_saved(pool, state_of, asked):
    saves, state = saves_of(pool), state_of(save_decoded=True)
    compute(saves, state, asked, 300)
    asked.num_tokens = asked.num_computed_tokens = 320
    assert saves.plan(state, asked, 1) == [], "the last token has no KV"
    asked.num_tokens = 321
    [save] = saves.plan(state, asked, 1)
    assert (save.plan.first_token, save.plan.keys.num_tokens) == (300, 320)


def step(new=(), cached=(), resumed=()):
    """A step of a vLLM that says what it adds: pairs of a request and its new blocks."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=id, block_ids=ids) for id, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[id for id, _ in cached],
            new_block_ids=[ids for _, ids in cached],
            resumed_req_ids=set(resumed),
        ),
    )


@pytest.mark.parametrize(
    ("steps", "table"),
    [
        ([{"new": [("r", ([1, 2],))]}, {"cached": [("r", ([3],))]}, {"cached": [("r", None)]}],
         [1, 2, 3]),
        ([{"new": [("r", ([1, 2],))]}, {"cached": [("r", ([7, 8, 9],))], "resumed": ["r"]}],
         [7, 8, 9]),
    ],
    ids=["added", "preempted"],
)  # fmt: skip
def test_what_an_older_vllm_adds_is_put_together(pool, state_of, asked, steps, table):
    saves = Saves(1, pool, BLOCK)
    for each in steps:
        saves.begin_step(step(**each))
    [save] = saves.plan(state_of(), asked, 192)
    assert list(save.block_ids[0]) == table
    saves.forget_tables("r")
    assert saves.plan(state_of(), asked, 192) == []
