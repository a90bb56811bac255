"""Models whose layers keep states: what P computes, what is saved of them, and where D loads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorScheduler,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from pdstore import open_store
from pdstore.adapters.vllm.messages import StepReport
from pdstore.format.handoff import Handoff, HandoffId
from tests.adapters.vllm.scheduler_kit import ONE_STATE, STATES, found, idle_step, step
from tests.adapters.vllm.scheduler_kit import scheduler_of as scheduler_of
from tests.adapters.vllm.scheduler_kit import url as url
from tests.adapters.vllm.standins import picture
from tests.support.kv import settings_of
from tests.support.states import StateInstance

PROMPT = list(range(1, 301))  # four blocks of 64 tokens, and 44 tokens
ROWS = [10, 11, 12, 13, 14, 15, 16, 17]
PREFILL = {"do_remote_decode": True}
ASKED = Handoff(HandoffId.new()).params()


MADE = ("mm_features", "prompt_embeds", "resumable", "cache_salt")


def request(prompt=PROMPT, params=None, request_id="r", max_tokens=1, pooling=None, **changes):
    """vLLM's own request. changes: what it is made with, or what a sampling parameter is."""
    made = {name: changes.pop(name) for name in MADE if name in changes}
    extra = None if params is None else {"kv_transfer_params": dict(params)}
    sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, **changes)
    return Request(request_id, prompt, None if pooling else sampling, pooling, **made)


def tables(**states):
    """Block tables of which only some entries of states are there: `tables(at3=(20, 21))`."""
    made = [[0] * 8, [0] * 8]
    for name, blocks in states.items():
        for table, block in zip(made, blocks, strict=True):
            table[int(name.removeprefix("at"))] = block
    return [*made, ROWS]


def states_of(save):
    """The states that a save reads, by table: the number of tokens and the block."""
    return [dict(table) for table in save.block_ids[:2]]


def held_by(scheduler):
    return sorted(scheduler.saves.block_pool.held)


@pytest.mark.parametrize("params", [PREFILL, PREFILL | ASKED])
def test_p_computes_all_but_the_last_token_of_a_prompt_that_it_hands_over(scheduler_of, params):
    p, asked = scheduler_of(states=STATES, role="prefill"), request(params=params)
    for _ in range(2):  # a second call changes nothing
        p.arrive(asked)
        assert asked.prompt_token_ids == list(asked.all_token_ids) == PROMPT[:-1]
        assert asked.num_prompt_tokens == asked.num_tokens == len(PROMPT) - 1
        assert asked.max_tokens == 1
    assert len(PROMPT) == 300, "vLLM's front end counts the tokens of this list"
    p.finish_request(asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_logprobs": 1},
        {"prompt": [7]},
        {"mm_features": [picture(1, offset=len(PROMPT) - 16)]},
        {"prompt_embeds": torch.zeros(300, 4)},
        {"pooling": PoolingParams(task="embed")},
        {"resumable": True},
        {"params": PREFILL | {"keeps_last_token": True}},
        {"params": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_p_keeps_the_last_token_where_somebody_needs_it(scheduler_of, changes):
    p = scheduler_of(states=STATES, role="prefill")
    asked = request(**{"params": PREFILL, **changes})
    before = asked.num_prompt_tokens, asked.max_tokens
    p.arrive(asked)
    assert (asked.num_prompt_tokens, asked.max_tokens) == before
    assert asked.num_tokens == before[0]


@pytest.mark.parametrize("keeps", [False, True])
def test_the_last_token_is_dropped_once_by_all_connectors_together(scheduler_of, keeps):
    """A MultiConnector gives one request to pdstore, and to vLLM's connectors, in any order."""
    params = PREFILL | {"keeps_last_token": keeps}
    p, asked = scheduler_of(states=STATES, role="prefill"), request(params=params)
    other = SimpleNamespace(_has_mamba=True)
    for _ in range(2):
        p.arrive(asked)
        MooncakeConnectorScheduler._truncate_mamba_request_for_prefill(other, asked)
        assert asked.num_prompt_tokens == asked.num_tokens == len(PROMPT) - (not keeps)
    assert len(asked.prompt_token_ids) == asked.num_tokens


def test_p_keeps_the_last_token_of_a_request_that_bypasses_the_pool(scheduler_of):
    """On a CPU, pages have room for what another tenant left there, so salts bypass the pool."""
    p = scheduler_of(states=STATES, role="prefill", page="cpu")
    asked = request(params=PREFILL, cache_salt="mine")
    p.arrive(asked)
    assert asked.num_prompt_tokens == len(PROMPT)


def test_p_is_whoever_is_asked_to_hand_over_and_no_other(scheduler_of):
    both, plain = scheduler_of(states=STATES), scheduler_of(role="prefill")
    lengths = []
    for scheduler, params in ((both, PREFILL), (both, None), (both, ASKED), (plain, PREFILL)):
        asked = request(params=params, max_tokens=20)
        scheduler.arrive(asked)
        lengths.append((asked.num_prompt_tokens, asked.max_tokens))
    assert lengths == [(299, 1), (300, 20), (300, 20), (300, 20)]


def test_a_picture_before_the_last_token_stays_whole(scheduler_of):
    p = scheduler_of(states=STATES, role="prefill")
    asked = request(params=PREFILL, mm_features=[picture(1, offset=len(PROMPT) - 17)])
    p.arrive(asked)
    assert asked.num_prompt_tokens == len(PROMPT) - 1


def test_a_hand_off_ends_with_the_states_after_its_last_token(scheduler_of):
    p, asked = scheduler_of(states=STATES, role="prefill"), request(params=PREFILL)
    p.arrive(asked)
    saves = step(p, asked, 256, tables(at0=(30, 31), at3=(20, 21))).saves
    assert [states_of(save) for save in saves] == [[{256: 20}, {256: 21}]]
    assert held_by(p) == [*ROWS[:4], 20, 21], "no other entry: vLLM moves those"
    [last] = step(p, asked, 43, tables(at3=(20, 21), at4=(24, 25))).saves
    assert states_of(last) == [{299: 24}, {299: 25}]
    assert list(last.block_ids[2]) == ROWS[:5]
    asked.append_output_token_ids(5)
    assert last.plan.handoff == Handoff.of(p.finish_request(asked)).id


@pytest.mark.parametrize(
    ("num_cached", "end", "states"),
    [(255, 256, (24, 25)), (254, 255, (24, 25)), (252, 253, (20, 21)), (256, 257, (24, 25))],
    ids=["a block's end", "drafts in two blocks", "in one block", "in the next block"],
)
def test_the_states_before_rejected_drafts_are_where_the_drafts_end(
    scheduler_of, num_cached, end, states
):
    """vLLM adds drafts to one token behind cached ones; three here, of which it takes none."""
    p, asked = scheduler_of(states=STATES, role="prefill"), request(PROMPT[: end + 1], PREFILL)
    p.arrive(asked)
    asked.num_computed_tokens = num_cached
    found(p, asked, num_cached)
    [save] = step(p, asked, 1 + 3, tables(at3=(20, 21), at4=(24, 25), at5=(26, 27))).saves
    assert states_of(save) == [{end: states[0]}, {end: states[1]}]
    plain, other = scheduler_of(states=STATES), request(PROMPT[:end], request_id="plain")
    found(plain, other, num_cached)
    other.max_tokens, other.num_computed_tokens = 20, num_cached
    named = [(0, 20, 256), (1, 21, 256)] if end == 256 else []
    assert step(plain, other, 1 + 3, tables(at3=(20, 21), at4=(24, 25)), named).saves == []


def test_a_state_that_the_next_step_overwrites_is_not_saved(scheduler_of):
    """Without prefix caching each step writes the same entry; nor is a chunk's inner end kept."""
    p, asked = scheduler_of(states=ONE_STATE, role="prefill"), request(params=PREFILL)
    p.arrive(asked)
    one = [[20], [21], ROWS]
    early = step(p, asked, 256, one).saves
    assert [states_of(save) for save in early] in ([], [[{}, {}]])
    [last] = step(p, asked, 43, one).saves
    assert states_of(last) == [{299: 20}, {299: 21}]
    plain, other = scheduler_of(states=ONE_STATE), request(request_id="plain", max_tokens=20)
    plain.arrive(other)
    assert step(plain, other, 256, one).saves == step(plain, other, 44, one).saves == []
    inner, third = scheduler_of(states=STATES), request(request_id="inner", max_tokens=20)
    inner.arrive(third)
    assert step(inner, third, 200, tables(at3=(20, 21))).saves == []


def test_without_the_states_at_its_end_a_hand_off_is_aborted(scheduler_of):
    """P computes an answer after the prompt here, which overwrites the state."""
    p, asked = scheduler_of(states=STATES, role="prefill"), request(max_tokens=20)
    p.arrive(asked)
    step(p, asked, 256, tables(at3=(20, 21)))
    assert step(p, asked, 44, tables(at3=(20, 21), at4=(24, 25))).saves == []
    assert p.finish_request(asked) is None
    assert len(idle_step(p).aborted_handoffs) == 1


def test_states_that_vllm_names_are_saved_and_half_of_one_is_not(scheduler_of):
    """Inside a step, vLLM may export the state of a block's end; its place is what it says."""
    both, asked = scheduler_of(states=STATES), request(max_tokens=20)
    both.arrive(asked)
    named = [(0, 40, 256), (1, 41, 256), (0, 42, 192)]
    [save] = step(both, asked, 300, tables(at4=(24, 25)), named).saves
    assert states_of(save) == [{256: 40}, {256: 41}]
    assert save.plan.keys.num_tokens == 256
    assert held_by(both) == [*ROWS[:4], 40, 41]


@pytest.fixture
def saved(url):
    """Saves prompts with states in the pool: `saved(PROMPT[:299], 256)`."""
    store = open_store(url, settings_of(store=url))
    instance = StateInstance(store)
    yield lambda tokens, *ends: instance.put(tokens, *ends)
    instance.close()
    store.close()


def test_d_loads_all_but_one_token_and_the_state_into_its_entry(saved, scheduler_of):
    saved(PROMPT[:299], 256)
    d, asked = scheduler_of(states=STATES, role="decode"), request()
    d.arrive(asked)
    assert found(d, asked) == 299
    d.load(asked, tables(at4=(24, 25)), 299)
    [load] = idle_step(d).loads
    assert load.plan.num_tokens == 299
    assert load.block_ids[:2] == [{299: 24}, {299: 25}]
    assert list(load.block_ids[2]) == ROWS[:5]


def test_a_load_without_a_place_for_the_state_fails(saved, scheduler_of, caplog):
    saved(PROMPT[:299], 256)
    d, asked = scheduler_of(states=STATES, role="decode"), request()
    d.load(asked, tables(at4=(24, 0)), found(d, asked))
    [load] = idle_step(d).loads
    assert load.plan is None
    assert load.block_ids[:2] == [{}, {}]
    assert "no blocks for the states" in caplog.text
    d.report(StepReport())
    assert found(d, asked) == 0, "it computes its prompt"
    d.finish_request(asked)
    assert not d.is_at_work


@pytest.mark.parametrize(("own", "expected"), [(0, 192), (256, 256)])
def test_vllm_is_told_where_a_prompt_parts_from_others(saved, scheduler_of, own, expected):
    saved(PROMPT[:299])  # its only state is at its end
    both, asked = scheduler_of(states=STATES), request([*PROMPT[:200], *range(900, 1000)])
    asked.shared_prefix_boundary = own
    assert found(both, asked) == 0
    assert asked.shared_prefix_boundary == expected
    alone, other = scheduler_of(states=ONE_STATE), request([*PROMPT[:200], 9], request_id="alone")
    assert found(alone, other) == 0
    assert other.shared_prefix_boundary == 0, "no step leaves a state there"


def answering(scheduler, asked, *named):
    """Computes the prompt and 340 tokens of answer; vLLM names states in steps of one token."""
    scheduler.arrive(asked)
    step(scheduler, asked, 300, tables(at3=(20, 21), at4=(24, 25)))
    for each in (*named, ()):
        asked.append_output_token_ids([7] * 40)
        asked.num_computed_tokens = asked.num_tokens - 1
        states = [(table, block, end) for table, (block, end) in enumerate(each)]
        step(scheduler, asked, 1, tables(), states)
    asked.num_computed_tokens = asked.num_tokens - 1


def test_an_answer_is_saved_up_to_the_last_state_that_vllm_named(scheduler_of):
    both, asked = scheduler_of(states=STATES), request(max_tokens=400)
    inner = [(44, 390), (45, 390)]  # no block of the pool ends there
    answering(both, asked, [(40, 320), (41, 320)], [(42, 384), (43, 384)], inner)
    assert held_by(both) == [42, 43], "one end of each answer"
    assert not both.saves, "no save holds them: vLLM may preempt"
    both.finish_request(asked, tables())
    [save] = idle_step(both).saves
    assert save.plan.keys.num_tokens == 384
    assert states_of(save) == [{384: 42}, {384: 43}]
    both.report(StepReport(released={save.number: 1}))
    assert held_by(both) == []


def test_a_preemption_by_a_step_that_computes_nothing_frees_the_states_of_an_answer(scheduler_of):
    both, asked = scheduler_of(states=STATES), request(max_tokens=400)
    answering(both, asked, [(40, 320), (41, 320)])
    assert held_by(both) == [40, 41]
    step(both, asked, 0, tables(), preempted=["r"])
    assert held_by(both) == []


@pytest.mark.parametrize("how", ["not named", "beyond the answer", "not asked for"])
def test_an_answer_without_a_state_is_not_saved(scheduler_of, how):
    both = scheduler_of(states=STATES, save_decoded=how != "not asked for")
    asked = request(max_tokens=400)
    end = 384 if how == "beyond the answer" else 320
    answering(both, asked, *([[(40, end), (41, end)]] if how != "not named" else []))
    asked.num_computed_tokens = min(asked.num_computed_tokens, 383)
    both.finish_request(asked, tables())
    assert idle_step(both).saves == []
    assert held_by(both) == []


def test_a_preempted_request_holds_no_states(scheduler_of):
    both, asked = scheduler_of(states=STATES), request(max_tokens=400)
    answering(both, asked, [(40, 320), (41, 320)])
    assert held_by(both) == [40, 41]
    step(both, asked, 1, tables(), preempted=["r"])
    assert held_by(both) == []
    asked.num_preemptions = 1
    step(both, asked, 1, tables(), named=[(0, 40, 384), (1, 41, 384)])
    assert held_by(both) == [], "else its next answer would lack them for ever"
