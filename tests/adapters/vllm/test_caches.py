"""The pool beside vLLM's own prefix cache: only what an instance lacks is loaded."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, new_prompt, prefill

BLOCK, LONG = 64, 900


def test_d_loads_only_what_its_prefix_cache_lacks(pair):
    prefix = new_prompt(5 * BLOCK)
    ask(pair.d, prefix + new_prompt(10))
    prompt = prefix + new_prompt(200)
    since = Since(pair.d)
    answer = ask(pair.proxy, prompt)
    assert since["vllm:prompt_tokens_by_source_total:local_cache_hit"] == len(prefix)
    assert since.loaded == 200
    num_values = -(-200 // BLOCK)
    assert since["pdstore_bytes_total:load"] < (num_values + 1) * bytes_of_a_block(pair)
    assert since.computed <= 1
    answer.assert_same(alone(pair.d, prompt))


def bytes_of_a_block(pair):
    """By what P saves of one block more."""
    sizes = []
    for num_tokens in (BLOCK, 2 * BLOCK):
        since = Since(pair.p)
        ask(pair.proxy, new_prompt(num_tokens), 1)
        sizes.append(since["pdstore_bytes_total:save"])
    return sizes[1] - sizes[0]


def test_p_computes_only_what_neither_it_nor_the_pool_has(pair):
    prefix = new_prompt(5 * BLOCK)
    ask(pair.proxy, prefix)
    since = Since(pair.p)
    prompt = prefix + new_prompt(100)
    answer = ask(pair.proxy, prompt)
    assert since.computed == 100
    assert since["pdstore_tokens_total:saved"] == 100
    answer.assert_same(alone(pair.d, prompt))


def test_p_saves_what_it_has_cached_when_the_pool_has_lost_it(pair):
    prefix = new_prompt(5 * BLOCK)
    prefill(pair.p, prefix)
    with pair.redis.client() as redis:
        for key in redis.keys("pds1:*:0:*"):
            redis.delete(key)
    since, prompt = Since(pair.d), prefix + new_prompt(100)
    answer = ask(pair.proxy, prompt)
    assert since.loaded == len(prompt)
    answer.assert_same(alone(pair.d, prompt))


def test_prompts_whose_logprobs_are_asked_for_are_computed(pair):
    prompt = new_prompt(300)
    params = prefill(pair.p, prompt)
    expected = alone(pair.d, prompt, prompt_logprobs=0)
    since = Since(pair.d)
    answer = ask(pair.d, prompt, kv_transfer_params=params, prompt_logprobs=0)
    assert since.loaded == 0
    assert since.computed == len(prompt)
    answer.assert_same(expected)
    for mine, theirs in zip(prompt_logprobs(answer), prompt_logprobs(expected), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def prompt_logprobs(answer):
    given = answer.body["choices"][0]["prompt_logprobs"]
    return [next(iter(token.values()))["logprob"] for token in given[1:]]
