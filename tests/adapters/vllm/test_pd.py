"""P, pool, D: the answers of one instance alone, and D computes nothing of the prompt."""

from __future__ import annotations

from functools import partial

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, at_once, new_prompt
from tests.support.kv import eventually

BLOCK = 64
LONG = 900


@pytest.mark.parametrize("num_tokens", [1, 10, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, LONG])
def test_answers_are_those_of_one_instance_alone(pair, num_tokens):
    prompt = new_prompt(num_tokens)
    expected = alone(pair.d, prompt)
    since = Since(pair.d)
    answer = ask(pair.proxy, prompt)
    answer.assert_same(expected)
    assert since.loaded == (num_tokens if num_tokens > 1 else 0)
    assert since.computed <= 1


def test_a_salted_request_has_nothing_to_do_with_the_pool(pair):
    prompt = new_prompt(300)
    ask(pair.proxy, prompt)
    # A worker's last look at a marker may be reported with a step after this answer.
    eventually(lambda: not of_the_pool(alone_since(pair.d, new_prompt(2))))
    since = alone_since(pair.d, prompt)
    assert not of_the_pool(since)
    assert since.computed == 300


def alone_since(server, prompt):
    """Counts what a server does for one answer that it gives by itself."""
    since = Since(server)
    alone(server, prompt)
    return since


def of_the_pool(since):
    """Counts of a request alone: an instance looks at the pool's id and room by itself."""
    names = tuple(f"pdstore_{name}_total" for name in ("tokens", "jobs", "misses", "drops"))
    return [name for name in since.all() if name.startswith(names)]


def test_each_of_forty_prompts_four_at_a_time_is_loaded_whole(pair):
    prompts = [new_prompt(LONG) for _ in range(40)]
    since = Since(pair.d)
    answers = at_once([partial(ask, pair.proxy, prompt, 2) for prompt in prompts])
    assert since.loaded == 40 * LONG
    assert since.computed <= 40
    for prompt, answer in zip(prompts[::8], answers[::8], strict=True):
        answer.assert_same(alone(pair.d, prompt, 2))


@pytest.mark.nightly
def test_six_hundred_prompts_eight_at_a_time_of_any_length(pair):
    prompts = [new_prompt(2 + 37 * n % 900) for n in range(600)]  # eight fit: none is preempted
    since = Since(pair.d)
    answers = at_once([partial(ask, pair.proxy, prompt) for prompt in prompts], workers=8)
    assert since.loaded == sum(len(prompt) for prompt in prompts)
    assert since.computed <= len(prompts)
    for prompt, answer in zip(prompts[::10], answers[::10], strict=True):
        answer.assert_same(alone(pair.d, prompt))
