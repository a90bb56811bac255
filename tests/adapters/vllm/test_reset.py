"""vLLM's requests to reset its caches leave the pool alone: it belongs to other instances too."""

from __future__ import annotations

import httpx

from tests.adapters.vllm.asking import ANSWER_S, Since, alone, ask, assert_idle, new_prompt, prefill

LONG = 900


def test_a_pause_and_a_reset_leave_the_pool_to_the_others(pair):
    prompt = new_prompt(LONG)
    params = prefill(pair.p, prompt)
    assert_idle(pair.p)
    own = f"pds1:{params['pdstore']['namespace']}:*"
    with pair.redis.client() as redis:
        stored = set(redis.keys(own))
        assert post(pair.d, "/reset_prefix_cache?reset_external=true") == {"success": True}
        post(pair.d, "/pause?mode=wait")  # it resets caches unless it is told not to
        post(pair.d, "/resume")
        assert stored - set(redis.keys(own)) == set()
    since = Since(pair.d)
    ask(pair.d, prompt, kv_transfer_params=params).assert_same(alone(pair.d, prompt))
    assert since.loaded == LONG


def test_a_reset_does_not_wait_for_a_store_that_hangs(pair):
    assert_idle(pair.p)
    pair.redis.pause()
    assert post(pair.p, "/reset_prefix_cache?reset_external=true") == {"success": True}


def post(server, path):
    response = httpx.post(server.url + path, timeout=ANSWER_S, trust_env=False)
    response.raise_for_status()
    return response.json()
