"""Models of every kind hand over: windows, MLA, TP sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.adapters.vllm.asking import (
    Since,
    alone,
    answers_after_losses,
    ask,
    assert_idle,
    at_once,
    new_prompt,
    prefill,
)
from tests.adapters.vllm.conftest import SCHEMES, pool_url, switched_on
from tests.support.file_pool import Losses

WINDOW = 64
LOSSES, MISSES = 0.1, 0.05  # the chance of a value to be lost, and of a call to miss


# vLLM's other backend for MLA, of CPUs with AMX, takes no float32.
MLA = ("--block-size=16", "--num-gpu-blocks-override=512", "--attention-backend=CPU_MLA")


# Ranks wait for each other awake: with more of them than cores everything takes seconds.
PATIENT = {"PDSTORE_HANDOFF_WAIT_S": "40", "PDSTORE_DEADLINE_S": "40"}


@pytest.fixture
def instances(launcher, checkpoints, started_pair):
    """Starts a P and some D's of a kind of checkpoint: `instances("gemma3", "prefill", ...)`."""
    servers = []

    def start(kind, roles, *options, store=started_pair.redis.url, **env):
        for role in roles:
            given = switched_on(store, role) | env
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
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_windows_are_handed_over_by_each_store_in_each_mode(
    request, instances, launcher, tmp_path, kind, scheme
):
    store = pool_url(request, scheme, tmp_path)
    p, d = instances(kind, ("prefill", "decode"), "--num-gpu-blocks-override=256", store=store)
    router = launcher.router(p, d, "--mode", "concurrent").wait_ready()
    for num_tokens in (10, WINDOW, WINDOW + 1, 300, 900):
        relayed, concurrent = new_prompt(num_tokens), new_prompt(num_tokens)
        since = Since(d)
        answers = [
            ask(d, relayed, kv_transfer_params=prefill(p, relayed)),
            ask(router, concurrent),
        ]
        assert since.computed <= 2, num_tokens
        for prompt, answer in zip((relayed, concurrent), answers, strict=True):
            answer.assert_same(alone(d, prompt))
    router.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_windows_of_which_a_pool_has_lost_a_part_are_computed(instances, tmp_path, kind):
    losses = Losses(tmp_path / "pool", LOSSES)
    options = ("--num-gpu-blocks-override=256",)
    p, d = instances(kind, ("prefill", "decode"), *options, store=f"file://{tmp_path}/pool")
    for prompt, answer in answers_after_losses(p, d, losses, range(100, 892, 33)):
        answer.assert_same(alone(d, prompt))
    assert all(losses.by_group.values()), losses.by_group


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_windows_that_calls_miss_are_computed_by_a_p_and_a_d_that_are_asked_at_once(
    instances, launcher, tmp_path, kind
):
    store = f"faulty+file://{tmp_path}/pool?error_rate=0&corrupt_rate=0&miss_rate={MISSES}"
    p, d = instances(kind, ("prefill", "decode"), "--num-gpu-blocks-override=256", store=store)
    router = launcher.router(p, d, "--mode", "concurrent").wait_ready()
    since = Since(d)
    for number in range(24):
        prompt = new_prompt(100 + 33 * number)
        ask(router, prompt).assert_same(alone(d, prompt))
    assert since.loaded > 0
    assert since["pdstore_store_codes_total:faulty_miss"] > 0
    router.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "llama_one_head", "mla"])
def test_two_tensor_parallel_ranks_load_and_save_what_they_hold(instances, kind):
    ranks = ("--tensor-parallel-size=2", *(MLA if kind == "mla" else ()))
    p, d = instances(kind, ("prefill", "decode"), *ranks, **PATIENT)
    for num_tokens in (63, 64, 900):
        prompt = new_prompt(num_tokens)
        since = Since(d)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        assert since.computed <= 1
        assert (
            since.loaded == num_tokens
        )  # by each rank: its head, its copy of the one head, or MLA's latent
        answer.assert_same(alone(d, prompt))
    assert_idle(p)
    assert_idle(d)


@pytest.mark.nightly
def test_unequal_tensor_parallel_sizes_hand_over_to_each_other(instances):
    shards = {"PDSTORE_KV_SHARDS": "2", **PATIENT}
    instances("llama", ("both",), "--tensor-parallel-size=2", **shards)
    two, one = instances("llama", ("both",), **shards)
    for p, d in ((two, one), (one, two)):
        for num_tokens in (63, 64, 900):
            prompt = new_prompt(num_tokens)
            since = Since(d)
            answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
            assert since.computed <= 1
            assert since.loaded == num_tokens
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


ROOT = Path(__file__).parents[3]
MAX_LOGPROB_DIFF = 1e-4


# Prompts of 150, 204, 79, 350 and 150 tokens; in whole blocks the first has 144 or 128 of them.
LOADED = {
    "llama": [0, 128, 64, 128, 150],
    "qwen3": [0, 128, 64, 128, 150],
    "gemma3": [0, 128, 64, 128, 149],
    "mla": [0, 144, 64, 144, 150],
}


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", LOADED)
def test_a_prompt_that_is_loaded_in_part_is_answered_as_transformers_does(
    kind: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_against_transformers", kind, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [loaded for loaded, *_ in rows] == LOADED[kind]
    assert all(is_same for _, is_same, _ in rows)
    assert max(diff for *_, diff in rows) < MAX_LOGPROB_DIFF
