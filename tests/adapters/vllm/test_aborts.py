"""Clients that go away in the middle of a load or a save: their blocks come back."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from tests.adapters.vllm.asking import (
    Client,
    Since,
    alone,
    ask,
    assert_blocks_are_back,
    assert_idle,
    at_once,
    counted,
    new_prompt,
    prefill,
)
from tests.support.kv import eventually
from tests.support.redis_gate import LOAD, SAVE

LONG = 900


def test_a_client_that_goes_away_while_its_prompt_is_loaded(pair):
    prompt = new_prompt(LONG)
    params = prefill(pair.p, prompt)
    since = Since(pair.d)
    pair.d_gate.hold(LOAD)
    client = Client(pair.d, prompt, kv_transfer_params=params)
    eventually(lambda: pair.d_gate.held, 30)
    eventually(lambda: counted(pair.d).get("pdstore_jobs_alive") == 1, 30)
    eventually(lambda: counted(pair.d).get("pdstore_slots_lent"), 30)
    client.go_away()
    assert_blocks_are_back(pair.d)  # although the store has not answered yet
    pair.d_gate.release()
    assert since["pdstore_jobs_total:load:cancelled"] == 1
    since = Since(pair.d)
    answer = ask(pair.d, prompt, kv_transfer_params=params)
    assert since.loaded == LONG
    answer.assert_same(alone(pair.d, prompt))


def test_a_client_that_goes_away_while_its_prompt_is_saved(pair):
    prompt = new_prompt(LONG)
    pair.p_gate.hold(SAVE)
    client = Client(pair.p, prompt, max_tokens=1000, kv_transfer_params={"do_remote_decode": True})
    eventually(lambda: pair.p_gate.held, 30)
    client.go_away()
    pair.p_gate.release()
    assert_idle(pair.p)
    answer = ask(pair.proxy, prompt)
    answer.assert_same(alone(pair.d, prompt))


def test_a_client_that_goes_away_while_d_waits_for_the_marker(pair):
    prompt = new_prompt(LONG)
    pair.p_gate.hold(SAVE)
    params = prefill(pair.p, prompt)
    client = Client(pair.d, prompt, kv_transfer_params=params)
    eventually(lambda: counted(pair.d)["vllm:num_requests_waiting"], 30)
    client.go_away()
    assert_idle(pair.d)
    pair.p_gate.release()
    since = Since(pair.d)
    ask(pair.d, prompt, kv_transfer_params=params).assert_same(alone(pair.d, prompt))
    assert since.loaded == LONG


@pytest.mark.nightly
def test_two_hundred_clients_of_whom_most_go_away_at_any_moment(pair):
    choose = random.Random(3)

    def come_and_go(number):
        prompt = new_prompt(choose.randrange(2, 1500))
        if number % 5 == 0:
            ask(pair.proxy, prompt).assert_same(alone(pair.d, prompt))
            return
        params = prefill(pair.p, prompt)
        client = Client(choose.choice([pair.p, pair.d]), prompt, kv_transfer_params=params)
        time.sleep(choose.random() * 0.1)  # not to wait for anything: to be at any point
        client.go_away()

    at_once([partial(come_and_go, number) for number in range(200)], workers=6)
    assert_idle(pair.p)
    assert_idle(pair.d)
    since, prompt = Since(pair.d), new_prompt(LONG)
    ask(pair.proxy, prompt).assert_same(alone(pair.d, prompt))
    assert since.loaded == LONG
