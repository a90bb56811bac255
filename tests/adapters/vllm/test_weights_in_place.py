"""Weights that are written in place, while P and D run: no KV passes from one to another."""

from __future__ import annotations

import httpx
import pytest

from tests.adapters.vllm.asking import (
    ANSWER_S,
    Since,
    alone,
    ask,
    assert_idle,
    new_prompt,
    prefill,
)
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.kv import eventually

LONG = 900
NUM_RANKS = 2
RESET = "/reset_prefix_cache?reset_external=true"


@pytest.fixture(scope="module")
def two(launcher, checkpoints, tmp_path_factory):
    """P and D of their own, over files."""
    url = f"file://{tmp_path_factory.mktemp('pool')}/pool"
    servers = [
        launcher.vllm(role, checkpoints("llama"), *CACHING, env=switched_on(url, role))
        for role in ("prefill", "decode")
    ]
    yield [server.wait_ready() for server in servers]
    for server in servers:
        server.stop()


def post(server, path, body=None):
    response = httpx.post(server.url + path, json=body, timeout=ANSWER_S, trust_env=False)
    response.raise_for_status()


def update(server, path):
    """Writes a checkpoint's weights in place, as vLLM advises: paused, with its caches reset."""
    post(server, "/pause?mode=wait")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    post(server, "/collective_rpc", call)
    post(server, "/resume")
    ask(server, new_prompt(3))  # the step that notices it


def handed_over(p, d, prompt):
    """Returns how many tokens D loads of what P hands over; its answer is right."""
    params = prefill(p, prompt)
    assert_idle(p)
    since = Since(d)
    ask(d, prompt, kv_transfer_params=params).assert_same(alone(d, prompt))
    return since.loaded


def test_kv_is_named_by_the_weights_that_computed_it(two, checkpoints):
    p, d = two
    first, second = checkpoints("llama"), checkpoints("llama", 1)
    prompts = [new_prompt(LONG) for _ in range(3)]
    assert handed_over(p, d, prompts[0]) == LONG

    update(d, second)
    since = Since(d)
    ask(d, prompts[0]).assert_same(alone(d, prompts[0]))
    assert since.loaded == 0, "the pool has KV of the earlier weights"
    params = prefill(p, prompts[1])
    assert_idle(p)

    def is_told():  # logs are limited to a warning each second
        since = Since(d)
        ask(d, prompts[1], kv_transfer_params=params).assert_same(alone(d, prompts[1]))
        assert since.loaded == 0, "P has the earlier weights"
        return "weights updated in place" in d.log.read_text()

    eventually(is_told)

    update(p, second)
    assert handed_over(p, d, prompts[2]) == LONG, "both have the same again"

    update(p, first)
    update(d, first)
    since = Since(d)
    ask(d, prompts[1]).assert_same(alone(d, prompts[1]))
    assert since.loaded >= LONG - LONG % 64, "KV of the first weights has its first name again"


def test_kv_in_vllms_own_cache_is_not_saved_under_another_weights_name(two, checkpoints):
    p, d = two
    prompt, kernels = new_prompt(LONG), {"method": "reload_weights"}
    update(p, checkpoints("llama"))
    update(d, checkpoints("llama"))
    ask(p, prompt)
    kernels["kwargs"] = {"weights_path": str(checkpoints("llama", 1))}
    for server in two:
        post(server, "/collective_rpc", kernels)  # nobody resets P's own cache
        ask(server, new_prompt(3))
    params = ask(p, prompt, 1, kv_transfer_params={"do_remote_decode": True}).params
    assert params is None, "P's answer comes from its cache"
    post(d, RESET)
    since = Since(d)
    ask(d, prompt).assert_same(alone(d, prompt))
    assert since.loaded == 0
    for server in two:
        post(server, RESET)
    assert handed_over(p, d, prompt) == LONG


@pytest.mark.nightly  # vLLM's ranks spin while they wait
def test_each_rank_tells_of_its_own_weights(launcher, checkpoints, tmp_path):
    options, env = (
        (*CACHING, f"--tensor-parallel-size={NUM_RANKS}"),
        switched_on(f"file://{tmp_path}/pool"),
    )
    both = launcher.vllm("ranks", checkpoints("llama"), *options, env=env).wait_ready()
    prompt, ends = new_prompt(LONG), LONG - LONG % 64

    def loaded():
        post(both, RESET)
        since = Since(both)
        ask(both, prompt)
        assert_idle(both)
        return since.loaded / NUM_RANKS

    assert [loaded(), loaded()] == [0, ends]
    for seed in (1, 0):
        update(both, checkpoints("llama", seed))
        assert [loaded(), loaded()] == [0 if seed else ends, ends]
    both.stop()
