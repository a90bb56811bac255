"""A load that fails at its first, middle or last block: computed instead, or a clean error."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, assert_idle, new_prompt, post, prefill
from tests.adapters.vllm.conftest import CACHING
from tests.support.kv import eventually
from tests.support.redis_gate import LOAD

BLOCK, LONG, NUM_BLOCKS = 64, 900, 15
BAD = {"first": 0, "middle": NUM_BLOCKS // 2, "last": NUM_BLOCKS - 1}


def delete(redis, key):
    redis.delete(key)


def corrupt(redis, key):
    redis.setrange(key, 1000, b"\0not KV\0")


def stored(p, prompt):
    """Returns what P's answer has for D, once P has stored all of the prompt."""
    params = prefill(p, prompt)
    assert_idle(p)
    return params


def spoil(pair, bad_block, harm, request):
    """The answer to a request whose load meets a block that went bad after it was matched."""
    pair.d_gate.hold(LOAD)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(request)
        keys = eventually(lambda: pair.d_gate.held, 30)
        with pair.redis.client() as redis:
            harm(redis, keys[bad_block])
        pair.d_gate.release()
        return answer.result()


@pytest.mark.requirement("R15, C12", "a load that fails is computed, not an error")
@pytest.mark.parametrize("harm", [delete, corrupt])
@pytest.mark.parametrize("bad_block", BAD.values(), ids=BAD)
def test_what_was_not_loaded_is_computed_and_not_asked_for_again(pair, bad_block, harm):
    prompt = new_prompt(LONG)
    params = stored(pair.p, prompt)
    since = Since(pair.d)
    answer = spoil(pair, bad_block, harm, lambda: ask(pair.d, prompt, kv_transfer_params=params))
    reason = "lost" if harm is delete else "corrupt"
    jobs = {name: n for name, n in since.all().items() if name.startswith("pdstore_jobs_total")}
    assert jobs == {f"pdstore_jobs_total:load:{reason}": 1}
    assert since.loaded == bad_block * BLOCK
    answer.assert_same(alone(pair.d, prompt))


def entry(url):
    """The connector that vLLM's own option turns on."""
    return {
        "kv_connector": "PDStoreConnector",
        "kv_connector_module_path": "pdstore.adapters.vllm",
        "kv_connector_extra_config": {"store": url},
    }


def configured(launcher, name, model, policy, config):
    """Starts a D with this configuration of its transfers."""
    config |= {"kv_role": "kv_consumer", "kv_load_failure_policy": policy}
    return launcher.vllm(name, model, *CACHING, f"--kv-transfer-config={json.dumps(config)}")


@pytest.fixture(scope="module")
def strict_d(started_pair, launcher, checkpoints):
    """A D where what cannot be loaded is an error."""
    config = entry(started_pair.d_gate.url)
    server = configured(launcher, "strict-d", checkpoints("llama"), "fail", config)
    yield server.wait_ready()
    server.stop()


@pytest.fixture(params=["recompute", "fail"])
def multi_d(request, started_pair, launcher, checkpoints, tmp_path):
    """A D with vLLM's MultiConnector over P's pool and another one. Returns it and its policy."""
    pools = started_pair.d_gate.url, f"file://{tmp_path}/pool?budget=100MiB"
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [entry(url) for url in pools]},
    }
    server = configured(launcher, "multi-d", checkpoints("llama"), request.param, config)
    yield server.wait_ready(), request.param
    server.stop()


@pytest.mark.nightly
def test_in_a_multi_connector_a_damaged_block_ends_a_request_only_if_its_policy_is_fail(
    pair, multi_d
):
    server, policy = multi_d
    assert ("kv_load_failure_policy is fail" in server.log.read_text()) is (policy == "fail")
    for bad_block in BAD.values():
        prompt = new_prompt(LONG)
        params = stored(pair.p, prompt)

        def request(prompt=prompt, params=params):
            return post(server, prompt, kv_transfer_params=params)

        response = spoil(pair, bad_block, corrupt, request)
        assert (response.status_code == 200) is (policy == "recompute"), response.text
        assert_idle(server)
    other = new_prompt(LONG)
    since = Since(server)
    answer = ask(server, other, kv_transfer_params=stored(pair.p, other))
    assert since.loaded == LONG
    answer.assert_same(alone(server, other))


@pytest.mark.parametrize("bad_block", BAD.values(), ids=BAD)
def test_with_policy_fail_the_request_is_an_error_and_the_engine_goes_on(pair, strict_d, bad_block):
    prompt = new_prompt(LONG)
    params = stored(pair.p, prompt)
    response = spoil(
        pair, bad_block, delete, lambda: post(strict_d, prompt, kv_transfer_params=params)
    )
    assert response.status_code >= 500, response.text
    assert_idle(strict_d)
    other = new_prompt(LONG)
    since = Since(strict_d)
    answer = ask(strict_d, other, kv_transfer_params=stored(pair.p, other))
    assert since.loaded == LONG
    answer.assert_same(alone(strict_d, other))
