"""Other kinds of KV cache: sliding windows, MLA, two tensor-parallel ranks."""

from __future__ import annotations

from functools import partial

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, assert_idle, at_once, new_prompt, prefill
from tests.adapters.vllm.conftest import switched_on

WINDOW = 64
# vLLM's other backend for MLA, of CPUs with AMX, takes no float32.
MLA = ("--block-size=16", "--num-gpu-blocks-override=512", "--attention-backend=CPU_MLA")
# Ranks wait for each other awake: with more of them than cores everything takes seconds.
PATIENT = {
    "PDSTORE_HANDOFF_WAIT_S": "40",
    "PDSTORE_DEADLINE_S": "40",
}


@pytest.fixture
def instances(launcher, checkpoints, started_pair):
    """Starts a P and some D's of a kind of checkpoint: `instances("gemma3", "prefill", ...)`."""
    servers = []

    def start(kind, roles, *options, **env):
        for role in roles:
            given = switched_on(started_pair.redis.url, role) | env
            servers.append(launcher.vllm(f"{kind}-{role}", checkpoints(kind), *options, env=given))
        return [server.wait_ready() for server in servers]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def gemma(instances, launcher):
    p, d = instances("gemma3", ("prefill", "decode"), "--num-gpu-blocks-override=256")
    proxy = launcher.proxy(p, d).wait_ready()
    yield p, d, proxy
    proxy.stop()


def test_sliding_windows_are_handed_over(gemma):
    p, d, proxy = gemma
    lengths = (10, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 300, 900)
    for num_tokens in lengths:
        num_new = 100 if num_tokens in (10, 300) else 3  # the window slides, from each side
        prompt = new_prompt(num_tokens)
        since = Since(d)
        answer = ask(proxy, prompt, num_new)
        assert since.computed <= 1, num_tokens
        answer.assert_same(alone(d, prompt, num_new))
    prompts = [new_prompt(900) for _ in range(8)]
    since = Since(d)
    answers = at_once([partial(ask, proxy, prompt, 2) for prompt in prompts])
    assert since.computed <= len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.assert_same(alone(d, prompt, 2))
    assert_idle(p)
    assert_idle(d)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "options"), [("llama", ()), ("mla", MLA)], ids=["llama", "mla"])
def test_two_tensor_parallel_ranks_load_and_save_what_they_hold(instances, kind, options):
    ranks = ("--tensor-parallel-size=2", *options)
    p, d = instances(kind, ("prefill", "decode"), *ranks, **PATIENT)
    for num_tokens in (63, 64, 900):
        prompt = new_prompt(num_tokens)
        since = Since(d)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        assert since.computed <= 1
        assert since.loaded == 2 * num_tokens  # each rank its half of the heads, or MLA's latent
        answer.assert_same(alone(d, prompt))
    assert_idle(p)
    assert_idle(d)


@pytest.mark.nightly
def test_unequal_tensor_parallel_sizes_hand_over_to_each_other(instances):
    shards = {"PDSTORE_KV_SHARDS": "2", **PATIENT}
    instances("llama", ("both",), "--tensor-parallel-size=2", **shards)
    two, one = instances("llama", ("both",), **shards)
    for p, d, num_ranks in ((two, one, 1), (one, two, 2)):
        for num_tokens in (63, 64, 900):
            prompt = new_prompt(num_tokens)
            since = Since(d)
            answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
            assert since.computed <= 1
            assert since.loaded == num_ranks * num_tokens
            answer.assert_same(alone(d, prompt))
    assert_idle(one)
    assert_idle(two)


def test_mla_is_handed_over(instances):
    p, d = instances("mla", ("prefill", "decode"), *MLA)
    for num_tokens in (15, 16, 17, 900):
        prompt = new_prompt(num_tokens)
        since = Since(d)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        assert since.loaded == num_tokens
        assert since.computed <= 1
        answer.assert_same(alone(d, prompt))
