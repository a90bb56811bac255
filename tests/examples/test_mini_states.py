"""A model with a state beside its KV: D computes one token, and answers as one instance does.

One request at a time gives the same answer to the last bit, as P and D compute the same chunks
that an engine alone does. In a batch the last digits differ.
"""

from __future__ import annotations

import pytest

from examples.mini_engine.request import Finish, Request
from examples.mini_engine.state import StateCache
from tests.support.engine_pools import store_url as store_url
from tests.support.mini_engine_kit import (
    PULL,
    ask,
    assert_next_turn_loads_the_answer_too,
    assert_right_over_a_faulty_store,
    assert_same,
    decode,
    hand_over,
    hand_over_at_once,
    pd_of,
    prompt_of,
    until_stored,
)

BLOCK = 64
LENGTHS = (1, 2, 40, 64, 65, 66, 128, 129, 200)


@pytest.fixture
def alone(open_engine):
    """An engine without a pool."""
    return open_engine(state=True)


@pytest.fixture
def open_one(open_instance):
    """Makes an instance with states."""
    return lambda role, **options: open_instance(role, state=True, **options)


def equal(asked, expected):
    """Returns whether two answers are the same to the last bit of their logprobs."""
    assert asked.finish == expected.finish == Finish("length")
    return asked.ids == expected.ids and asked.logprobs == expected.logprobs


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_d_computes_one_token_and_answers_as_an_engine_alone(
    open_engine, store_url, alone, is_concurrent
):
    """Over each store; also at lengths where the prompt without its last token ends a block."""
    p, d = (open_engine(pd=pd_of(role, store_url), state=True) for role in ("prefill", "decode"))
    for num_tokens in LENGTHS:
        prompt = prompt_of(num_tokens)
        if is_concurrent:
            asked = hand_over_at_once(p, d, prompt)
        else:
            asked = decode(d, prompt, hand_over(p, prompt))
        assert equal(asked, ask(alone, prompt).wait())
        assert (asked.request.num_loaded, asked.request.num_prefill_tokens) == (num_tokens - 1, 1)


def test_engine_blocks_may_differ_between_p_and_d(open_one, open_engine):
    """With a layer range of its own for the states, after the self-test of each instance."""
    pd = {"layer_ranges": 3, "selftest": True}
    p = open_one("prefill", pd=pd, block_size=32)
    d = open_one("decode", pd=pd, block_size=8, num_blocks=256)
    alone = open_engine(state=True, block_size=8, num_blocks=256)
    for num_tokens in (40, 65, 200):
        prompt = prompt_of(num_tokens)
        assert equal(decode(d, prompt, hand_over(p, prompt)), ask(alone, prompt).wait())


def test_without_its_state_d_answers_something_else(open_one, alone, monkeypatch):
    """So the tests of this file would notice a state that was not handed over."""
    p, d = open_one("prefill"), open_one("decode")
    prompts = [prompt_of(num_tokens) for num_tokens in (40, 65, 200)]
    params = [hand_over(p, prompt) for prompt in prompts]
    begin_load, unused = d.adapter.pool.begin_load, len(d.cache.states.rows) - 1

    def load_without_states(plan, tables):
        blocks, states = tables
        return begin_load(plan, [blocks, dict.fromkeys(states, unused)])

    monkeypatch.setattr(d.adapter.pool, "begin_load", load_without_states)
    for prompt, handed in zip(prompts, params, strict=True):
        asked, expected = decode(d, prompt, handed), ask(alone, prompt).wait()
        assert asked.request.num_loaded == len(prompt) - 1
        assert (
            asked.ids != expected.ids
            or max(abs(a - b) for a, b in zip(asked.logprobs, expected.logprobs, strict=True))
            > 0.01
        )


def test_p_answers_with_the_usage_of_the_whole_prompt(open_one):
    asked = ask(open_one("prefill"), prompt_of(100), max_tokens=5, kv_transfer_params=PULL).wait()
    assert asked.request.prompt == prompt_of(100)
    assert (asked.request.num_prefill_tokens, len(asked.ids)) == (99, 1)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_p_keeps_the_last_token_if_d_goes_on_behind_ps_first_token(open_one, alone, num_tokens):
    p, d = open_one("prefill"), open_one("decode")
    prompt, expected = prompt_of(num_tokens), ask(alone, prompt_of(num_tokens)).wait()
    params = {**PULL, "keeps_last_token": True}
    first = ask(p, prompt, max_tokens=1, kv_transfer_params=params).wait()
    assert (first.ids, first.logprobs) == (expected.ids[:1], expected.logprobs[:1])
    rest = ask(d, prompt + first.ids, 7, kv_transfer_params=first.request.answer_params).wait()
    assert (rest.ids, rest.logprobs) == (expected.ids[1:], expected.logprobs[1:])
    assert (rest.request.num_loaded, rest.request.num_prefill_tokens) == (num_tokens, 1)


@pytest.mark.parametrize(("chunk", "num_loaded"), [(48, 0), (64, 128), (200, 0)])
def test_a_state_is_saved_only_where_a_step_ends_at_a_blocks_end(
    open_one, alone, chunk, num_loaded
):
    """And at the end of a hand-off, after which P computes nothing more."""
    p, d = open_one("prefill", max_num_batched_tokens=chunk), open_one("decode")
    prompt = prompt_of(200)
    asked, expected = decode(d, prompt, hand_over(p, prompt)), ask(alone, prompt).wait()
    assert_same(asked, expected.ids, expected.logprobs)
    assert asked.request.num_prefill_tokens == 1
    until_stored(p)
    for num_shared, wanted in ((150, num_loaded), (200, 192)):
        other = prompt[:num_shared] + prompt_of(20)
        asked, expected = ask(d, other).wait(), ask(alone, other).wait()
        assert_same(asked, expected.ids, expected.logprobs)
        assert asked.request.num_loaded == wanted


def test_a_shared_prefix_is_computed_once_more_and_then_loaded_up_to_where_prompts_part(
    open_one, open_engine
):
    """As with one instance's own cache: the second prompt leaves a state at the junction."""
    instances = [open_one("both", max_num_batched_tokens=256) for _ in range(3)]
    alone = open_engine(state=True, max_num_batched_tokens=256)
    shared, loaded = prompt_of(150), []
    for seed, instance in enumerate(instances, 1):
        prompt = shared + prompt_of(100, seed)
        asked, expected = ask(instance, prompt).wait(), ask(alone, prompt).wait()
        assert_same(asked, expected.ids, expected.logprobs)
        until_stored(instance)
        loaded.append(asked.request.num_loaded)
    assert loaded == [0, 0, 128]


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(200, 150), (64, 65), (10, 54), (63, 2)])
def test_the_next_turn_loads_the_prompt_and_the_answer(open_one, alone, num_prompt, num_answer):
    p, d = open_one("prefill"), open_one("decode")
    prompt = prompt_of(num_prompt)
    assert_next_turn_loads_the_answer_too(p, d, alone, prompt, num_answer, BLOCK)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whatever_the_store_does(open_one, alone, monkeypatch, seed):
    """Errors, misses and flipped bits at random, requests of one prompt at once, and aborts."""
    assert_right_over_a_faulty_store(open_one, alone, monkeypatch, seed)


def test_a_kept_state_stays_as_it_is_while_its_request_goes_on():
    states = StateCache(4, 2, "cpu")
    request = Request([1, 2, 3], 1, print)
    states.admit(request)
    states.keep(request, 2)
    inputs = states.rows.new_tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    at_two = states.advance(request, 0, inputs[:2]).clone()
    at_three = states.advance(request, 2, inputs[2:])
    assert states.rows[request.states[2]].equal(at_two)
    assert at_three.equal(states.rows[request.slot])
    assert at_three.equal(at_two * 0.9 + inputs[2])
    states.give_back(request)
    assert states.num_used == 0
