"""PDSTORE_ON_MISS=fail with vLLM: a lost hand-off ends its request, or is made again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdstore.format.handoff import HandoffId
from tests.adapters.vllm.asking import (
    Since,
    alone,
    assert_blocks_are_back,
    assert_idle,
    new_prompt,
    post,
    prefill,
)
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.kv import eventually
from tests.support.redis_gate import LOAD, SAVE

LONG = 900
PATIENT_S = 30
DEAD_S = 20.0
"""A dead P costs D 1.5 s; a machine may be slow."""


@pytest.fixture(scope="module")
def strict_d(started_pair, launcher, checkpoints):
    """A D that would wait long for a marker, and computes nothing in its place."""
    env = switched_on(started_pair.d_gate.url, "decode")
    env |= {"PDSTORE_ON_MISS": "fail", "PDSTORE_HANDOFF_WAIT_S": str(PATIENT_S)}
    server = launcher.vllm("strict-d", checkpoints("llama"), *CACHING, env=env)
    yield server.wait_ready()
    server.stop()


@pytest.mark.nightly
def test_a_killed_p_fails_its_request_within_seconds(pair, strict_d, launcher):
    p, prompt = launcher.again(pair.p).wait_ready(), new_prompt(LONG)
    pair.p_gate.hold(SAVE)
    params = prefill(p, prompt)
    eventually(lambda: pair.p_gate.held, 30)
    since = Since(strict_d)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, strict_d, prompt, kv_transfer_params=params)
        p.kill()
        began = time.monotonic()
        assert answer.result().status_code == 500
    took = time.monotonic() - began
    print(f"D ended the request {took:.2f} s after P's death")
    assert took < DEAD_S
    ends = [since[f"pdstore_misses_total:handoff_{end}"] for end in ("dead", "gone")]
    assert sum(ends) == 1, "it may have lived to its first beat"
    assert_blocks_are_back(strict_d)


@pytest.mark.nightly
def test_a_marker_that_is_late_fails_its_request_alone(pair, strict_d):
    """A hand-off that no P has announced is waited for, and others are answered meanwhile."""
    since, never, prompt = Since(strict_d), {"attempt": HandoffId.new().hex}, new_prompt(LONG)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(
            post, strict_d, new_prompt(LONG), kv_transfer_params={"pdstore": never}
        )
        answer = post(strict_d, prompt, kv_transfer_params=prefill(pair.p, prompt))
        assert answer.status_code == 200
        assert not late.done()
        assert late.result().status_code == 500
    assert since["pdstore_misses_total:handoff_late"] == 1
    assert_blocks_are_back(strict_d)


@pytest.mark.nightly
@pytest.mark.parametrize("retries", [0, 1])
def test_behind_the_router_a_lost_block_is_a_502_or_made_again(pair, strict_d, launcher, retries):
    router = launcher.router(pair.p, strict_d, "--retries", str(retries)).wait_ready()
    prompt = new_prompt(LONG)
    pair.d_gate.hold(LOAD)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, router, prompt)
        key = eventually(lambda: pair.d_gate.held, 30)[0]
        with pair.redis.client() as redis:
            redis.delete(key)
        pair.d_gate.release()
        response = answer.result()
    router.stop()
    if retries:
        expected = alone(strict_d, prompt).ids
        assert response.json()["choices"][0]["token_ids"] == expected
    else:
        assert response.status_code == 502
        assert "pdstore_misses" in response.json()["error"]["message"]
    assert_idle(strict_d)
