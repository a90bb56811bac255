"""SavePlanner: every computed token is saved once, and blocks are held until they are saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore import Layout
from pdstore.adapters.vllm.block_refs import BlockRefs
from pdstore.adapters.vllm.request import RequestTracker
from pdstore.adapters.vllm.saves import SavePlanner
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys
from tests.support.kv import LAYERS, settings_of

BLOCK, PROMPT = 64, list(range(1, 301))
TABLE = [10, 11, 12, 13, 14, 15, 16, 17]


class Pool:
    """Counts references to blocks, as vLLM's BlockPool does."""

    def __init__(self) -> None:
        self.blocks = list(range(32))
        self.held: list[int] = []

    def touch(self, blocks) -> None:
        self.held += blocks

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            self.held.remove(block)


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def tracker():
    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=64, rope="")
    keys = PromptKeys(layout.namespace(settings, weights="w")).extend(PROMPT)
    tokens = [*PROMPT, *range(1000, 1200)]
    request = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=len(PROMPT), all_token_ids=tokens
    )
    return RequestTracker(request, keys)


def planner_of(pool, **settings) -> SavePlanner:
    refs = BlockRefs(pool, num_ranks=1)
    planner = SavePlanner(settings_of(**settings), refs, BLOCK)
    state = SimpleNamespace(get_block_ids=lambda request_id: [TABLE])
    planner.step(SimpleNamespace(kv_connector_block_state=state))
    return planner


def compute(planner, tracker, *chunks):
    """The saves of a request that is computed in these chunks."""
    saves = []
    for num_tokens in chunks:
        saves.append(planner.plan(tracker, num_tokens))
        tracker.request.num_computed_tokens += num_tokens
    return saves


def test_each_chunk_saves_what_it_computes(pool, tracker):
    saves = compute(planner_of(pool), tracker, 128, 128, 44)
    assert [(s.first_token, s.keys.num_tokens) for s in saves] == [(0, 128), (128, 256), (256, 300)]
    assert [list(s.tables[0]) for s in saves] == [TABLE[:2], TABLE[:4], TABLE[:5]]


def test_a_save_holds_its_new_blocks_until_it_is_released(pool, tracker):
    [first, second] = compute(planner_of(pool), tracker, 128, 128)
    assert pool.held == TABLE[:2] + TABLE[2:4]
    assert first.number != second.number


def test_the_last_chunk_publishes_the_hand_off_and_holds_the_whole_prompt(pool, tracker):
    tracker.handoff = HandoffId.new()
    saves = compute(planner_of(pool), tracker, 256, 44)
    assert [s.handoff for s in saves] == [None, tracker.handoff]
    assert pool.held == TABLE[:4] + TABLE[:5]
    assert tracker.is_announced
    assert not tracker.is_prompt_pending


def test_a_hand_off_of_a_prompt_that_is_saved_already_is_published_all_the_same(pool, tracker):
    tracker.handoff, tracker.num_saved = HandoffId.new(), len(PROMPT)
    tracker.request.num_computed_tokens = len(PROMPT) - 1
    [save] = compute(planner_of(pool), tracker, 1)
    assert save.handoff == tracker.handoff


def test_a_decode_instance_saves_no_prompt(pool, tracker):
    assert compute(planner_of(pool, role="decode"), tracker, 300) == [None]
    assert pool.held == []


def test_decoded_blocks_are_saved_when_they_are_whole(pool, tracker):
    planner = planner_of(pool, save_decoded=True)
    compute(planner, tracker, 300)
    tracker.request.num_tokens = 330
    tracker.request.num_computed_tokens = 319
    assert planner.plan(tracker, 1) is None
    tracker.request.num_computed_tokens = 320
    save = planner.plan(tracker, 1)
    assert (save.first_token, save.keys.num_tokens) == (300, 320)


def test_decoded_blocks_are_not_saved_unless_asked_for(pool, tracker):
    planner = planner_of(pool)
    compute(planner, tracker, 300)
    tracker.request.num_tokens, tracker.request.num_computed_tokens = 400, 399
    assert planner.plan(tracker, 1) is None
