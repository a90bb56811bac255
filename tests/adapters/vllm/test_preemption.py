"""Few KV blocks: requests are preempted on both sides, and all answers are right."""

from __future__ import annotations

from functools import partial

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, assert_idle, at_once, new_prompt
from tests.adapters.vllm.conftest import switched_on

NUM_BLOCKS = 34  # of 64 tokens: one request of 2048 tokens fits
NUM_NEW = 60  # with it a prompt of 480 tokens takes a ninth block, and four of them fit no more


@pytest.fixture(scope="module")
def small(launcher, checkpoints, started_pair):
    """One instance that is P and D, and the proxy that asks it for both."""
    env = switched_on(started_pair.redis.url)
    options = (f"--num-gpu-blocks-override={NUM_BLOCKS}",)
    server = launcher.vllm("small", checkpoints("llama"), *options, env=env).wait_ready()
    proxy = launcher.proxy(server, server).wait_ready()
    yield server, proxy
    proxy.stop()
    server.stop()


def test_answers_are_right_although_requests_are_preempted(small):
    server, proxy = small
    prompts = [new_prompt(480 + n) for n in range(8)]
    since = Since(server)
    answers = at_once([partial(ask, proxy, prompt, NUM_NEW) for prompt in prompts], workers=8)
    assert since["vllm:num_preemptions_total"] > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.assert_same(alone(server, prompt, NUM_NEW))
    assert_idle(server)
    since = Since(server)
    ask(proxy, prompts[0]).assert_same(alone(server, prompts[0]))
    assert since.loaded >= len(prompts[0])
