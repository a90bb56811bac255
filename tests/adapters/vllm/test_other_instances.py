"""Instances beside the pair: restarted ones, and some whose KV is another one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.vllm.asking import Since, alone, ask, counted, forget, new_prompt, prefill
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.kv import eventually
from tests.support.redis_gate import SAVE

BLOCK, LONG = 64, 900
NO_ANSWERS = {"PDSTORE_SAVE_DECODED": "0"}  # else a D loads what it computed and saved itself

HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
OTHER_DTYPE = "--kv-cache-dtype=fp8" if HAS_AVX512 else "--dtype=float32"
"""Another dtype of the KV than bfloat16: vLLM has FP8 only on processors with AVX-512."""


@pytest.fixture
def started(launcher):
    """Servers of one test: they are stopped after it."""
    servers = []

    def wait(server):
        servers.append(server)
        return server.wait_ready()

    yield wait
    for server in servers:
        server.stop()


def test_a_new_d_loads_what_the_pool_has(pair, launcher, started):
    prompt = new_prompt(LONG)
    params = prefill(pair.p, prompt)
    d = started(launcher.again(pair.d))
    since = Since(d)
    answer = ask(d, prompt, kv_transfer_params=params)
    assert since.loaded == LONG
    answer.assert_same(alone(pair.d, prompt))
    other = new_prompt(640)
    ask(pair.proxy, other)
    since = Since(d)
    ask(d, other).assert_same(alone(pair.d, other))  # of which it was not told
    assert since.loaded == len(other)


def test_a_new_p_loads_what_the_pool_has_and_one_that_dies_is_not_waited_for_long(
    pair, launcher, started
):
    prompt = new_prompt(640)
    ask(pair.proxy, prompt)
    p = started(launcher.again(pair.p))
    since = Since(p)
    longer = prompt + new_prompt(100)
    params = prefill(p, longer)
    assert since.loaded == len(prompt)
    answer = ask(pair.d, longer, kv_transfer_params=params)
    answer.assert_same(alone(pair.d, longer))

    dying = new_prompt(LONG)
    pair.p_gate.hold(SAVE)
    params = prefill(p, dying)
    eventually(lambda: pair.p_gate.held, 30)
    p.kill()
    since = Since(pair.d)
    ask(pair.d, dying, kv_transfer_params=params).assert_same(alone(pair.d, dying))
    assert since["pdstore_misses_total:handoff_gone"] == 1, "it had stored nothing"


def assert_never_loads(p, d, field):
    """D refuses P's hand-off because of a field of the namespace, says so, and answers rightly."""
    prompt = new_prompt(LONG)
    params = prefill(p, prompt)
    since = Since(d)
    expected = alone(d, prompt)
    for more in ({"kv_transfer_params": params}, {}):
        ask(d, prompt, **more, prompt_logprobs=None).assert_same(expected)
    assert since.loaded == 0
    assert since["pdstore_misses_total:namespace"] == 1
    [line] = [line for line in d.log.read_text().splitlines() if "does not fit" in line]
    assert field in line


@pytest.mark.misconfiguration("weights were changed under the same name")
def test_other_weights_of_the_same_name_are_never_loaded(pair, launcher, checkpoints, started):
    model = checkpoints("llama", seed=1)
    assert model.name == checkpoints("llama").name
    env = switched_on(pair.redis.url, "decode") | NO_ANSWERS
    assert_never_loads(pair.p, started(launcher.vllm("other-weights", model, env=env)), "weights")


def test_kv_of_another_dtype_is_never_loaded(pair, launcher, checkpoints, started):
    model = checkpoints("llama")
    p, d = (
        launcher.vllm(role, model, "--dtype=bfloat16", *options, env=env)
        for role, options in (("prefill", ()), ("decode", (OTHER_DTYPE,)))
        for env in [switched_on(pair.redis.url, role) | NO_ANSWERS]
    )
    assert_never_loads(started(p), started(d), "dtype")


@pytest.mark.requirement("C1", "a decoded block is saved only when all of its KV is computed")
def test_the_next_turn_s_p_loads_the_prompt_and_the_answer(pair, launcher, checkpoints, started):
    env = switched_on(pair.redis.url, "decode")
    d = started(launcher.vllm("saving-d", checkpoints("llama"), *CACHING, env=env))
    prompt = new_prompt(200)
    answer = ask(d, prompt, 150, kv_transfer_params=prefill(pair.p, prompt))
    answer.assert_same(alone(pair.d, prompt, 150))
    # The last token of an answer is never computed in its own turn.
    whole_blocks = (200 + 150 - 1) // BLOCK * BLOCK
    num_saved = whole_blocks - 200 // BLOCK * BLOCK
    eventually(lambda: counted(d).get("pdstore_tokens_total:saved", 0) >= num_saved, 30)
    turn = prompt + answer.ids + new_prompt(3)
    forget(pair.p)
    since = Since(pair.p)
    answer = ask(pair.proxy, turn)
    assert (since.loaded, since.computed) == (whole_blocks, len(turn) - whole_blocks)
    answer.assert_same(alone(pair.d, turn))
