"""vLLM's own request to reset its caches clears this namespace in the pool, and no other one."""

from __future__ import annotations

import httpx

from tests.adapters.vllm.asking import ANSWER_S, Since, alone, ask, assert_idle, new_prompt, prefill

LONG = 900
OTHERS = f"pds1:{'0' * 32}:0:0:{'1' * 32}"


def test_a_reset_forgets_this_namespace_only(pair):
    prompt = new_prompt(LONG)
    namespace = prefill(pair.p, prompt)["pdstore"]["namespace"]
    assert_idle(pair.p)
    with pair.redis.client() as redis:
        redis.set(OTHERS, b"a block")
        assert reset(pair.p).json() == {"success": True}
        assert redis.keys(f"pds1:{namespace}:*") == []
        assert redis.get(OTHERS) == b"a block"
    since = Since(pair.d)
    ask(pair.d, prompt).assert_same(alone(pair.d, prompt))
    assert since.loaded == 0
    other = new_prompt(LONG)
    since = Since(pair.d)
    ask(pair.proxy, other).assert_same(alone(pair.d, other))
    assert since.loaded == LONG


def reset(server):
    url = server.url + "/reset_prefix_cache?reset_external=true"
    return httpx.post(url, timeout=ANSWER_S, trust_env=False)
