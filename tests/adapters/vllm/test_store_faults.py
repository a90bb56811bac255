"""The store is killed or stops: right answers in bounded time, and it is used again when back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.ports import free_port
from tests.adapters.vllm.asking import Since, alone, ask, new_prompt, prefill
from tests.adapters.vllm.servers import SETTINGS
from tests.support.kv import eventually
from tests.support.redis_gate import LOAD, SAVE

LONG = 900
SLACK_S = 15.0  # a busy machine's
DROPPED = "pdstore_drops_total:store_down"


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as thread:
        yield thread


def assert_loads_again(pair):
    """Soon prompts are handed over as before."""

    def is_loaded():
        since = Since(pair.d)
        ask(pair.proxy, new_prompt(100), 1)
        return since.loaded == 100

    eventually(is_loaded, 30)


def restart(pair):
    pair.redis.start()
    assert_loads_again(pair)


@pytest.mark.parametrize("during", [None, "save", "load"], ids=["before", "save", "load"])
def test_killed_before_a_request_and_during_its_save_and_its_load(pair, thread, during):
    prompt, since = new_prompt(LONG), Since(pair.d)
    gate, verb = (pair.p_gate, SAVE) if during == "save" else (pair.d_gate, LOAD)
    if during is None:
        pair.redis.stop()
    else:
        gate.hold(verb)
    answer = thread.submit(ask, pair.proxy, prompt)
    if during is not None:
        eventually(lambda: gate.held, 30)
        pair.redis.stop()
        gate.release()
    answer.result().assert_same(alone(pair.d, prompt))
    if during == "load":
        assert since["pdstore_jobs_total:load:store_down"] == 1
    restart(pair)


def assert_others_go_on(pair, waiting):
    """Answers without the pool come while another request waits for it."""
    for server in (pair.p, pair.d):
        alone(server, new_prompt(100))
    assert not waiting.done()


def test_stopped_during_a_load(pair, thread):
    prompt = new_prompt(LONG)
    params = prefill(pair.p, prompt)
    since = Since(pair.d)
    pair.d_gate.hold(LOAD)
    answer = thread.submit(ask, pair.d, prompt, kv_transfer_params=params)
    eventually(lambda: pair.d_gate.held, 30)
    begin = time.monotonic()
    assert_others_go_on(pair, answer)
    answer.result().assert_same(alone(pair.d, prompt))
    waits = ("PDSTORE_HANDOFF_WAIT_S", "PDSTORE_DEADLINE_S")  # the load follows P's save
    assert time.monotonic() - begin < sum(float(SETTINGS[name]) for name in waits) + SLACK_S
    ended = [name for name in since.all() if name.startswith("pdstore_jobs_total:load:")]
    assert len(ended) == 1
    assert not ended[0].endswith(":ok")
    pair.d_gate.release()
    assert_loads_again(pair)


@pytest.mark.nightly
def test_a_store_that_comes_and_goes_twenty_times(pair):
    """Requests go on all the while, four at a time, and every answer is right."""
    prompts = [new_prompt(700 + n) for n in range(120)]
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(ask, pair.proxy, prompt) for prompt in prompts]
        for turn in range(20):
            eventually(lambda turn=turn: sum(a.done() for a in answers) >= 6 * turn, 120)
            if turn % 2:
                pair.redis.stop()
                pair.redis.start()
            else:
                pair.redis.pause()
                alone(pair.d, new_prompt(50))
                pair.redis.resume()
        for prompt, answer in zip(prompts, answers, strict=True):
            answer.result().assert_same(alone(pair.d, prompt))
    assert_loads_again(pair)


def test_a_store_that_takes_no_writes_costs_d_one_wait(pair):
    def handed_over():
        """Returns how P's last save ended, and what D loaded."""
        prompt, saves = new_prompt(LONG), Since(pair.p)
        params, since = prefill(pair.p, prompt), Since(pair.d)
        ask(pair.d, prompt, kv_transfer_params=params).assert_same(alone(pair.d, prompt))
        eventually(lambda: saves["pdstore_jobs_total:save:ok"] or saves[DROPPED], 30)
        return params["pdstore"].get("last_save"), since

    with pair.redis.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        try:
            last_save, since = handed_over()
            assert (last_save, since.loaded) == (None, 0)
            last_save, since = handed_over()
            assert (last_save, since.loaded) == ("store_down", 0)
            for end in ("dead", "gone"):
                assert since[f"pdstore_misses_total:handoff_{end}"] == 0
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
    assert_loads_again(pair)  # P asks the store again when its breaker's pause is over
    assert handed_over()[1].loaded == LONG
    assert handed_over()[0] is None


def test_another_tokenizer_is_told_with_both_counts(pair):
    params = prefill(pair.p, new_prompt(94))
    ask(pair.d, new_prompt(122), kv_transfer_params=params)
    eventually(lambda: "P had 94 tokens, this instance 122" in pair.d.log.read_text(), 30)
