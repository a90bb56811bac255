"""Pipeline stages: P and D of unlike sizes hand over, and each stage knows the whole model."""

from __future__ import annotations

import os
import re
import signal

import pytest

from pdstore.adapters.vllm.layers import joined
from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout
from tests.adapters.vllm.asking import Since, alone, ask, assert_idle, new_prompt, prefill
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.kv import eventually, settings_of
from tests.support.redis_gate import SAVE, Gate

LONG = 900  # several steps, and a tail
FULL, SLIDING = LayerSpec(2, 8), LayerSpec(2, 8, window=64, table=1)


def named(spec, *numbers):
    return {f"model.layers.{number}": spec for number in numbers}


def test_layers_stand_as_one_rank_would_have_them():
    stages = [named(FULL, 0, 2) | named(SLIDING, 1), named(FULL, 4) | named(SLIDING, 3, 5)]
    layers, pipeline = joined(stages, 1)
    whole = named(FULL, 0, 2, 4) | named(SLIDING, 1, 3, 5)
    assert list(layers.items()) == list(whole.items())
    assert (pipeline.stage_of, pipeline.stage) == ((0, 0, 1, 0, 1, 1), 1)


def test_a_stage_that_cannot_be_served_ends_the_start_of_all():
    with pytest.raises(LayoutError, match="pipeline stage 1: it has a Mamba layer"):
        joined([named(FULL, 0), "it has a Mamba layer"], 0)


def in_two_stages(**settings):
    """Gemma 3 12B: five windows, then full attention. vLLM deals 40 windows out to five tables."""
    layers = {}
    for number in range(48):
        table = 5 if number % 6 == 5 else (number - number // 6) % 5
        spec = LayerSpec(8, 256, window=None if table == 5 else 1024, table=table)
        layers |= named(spec, number)
    names = list(layers)
    stages = [{name: layers[name] for name in each} for each in (names[:24], names[24:])]
    every, pipeline = joined(stages, 0)
    return Layout.of(
        settings_of(**settings),
        dtype="bfloat16",
        layers=[*every.values()],
        engine_block_tokens=64,
        boundary_tokens=64,
        rope="",
        pipeline=pipeline,
    )


def test_stages_of_a_model_with_windows_are_told_how_many_ranges_fit():
    with pytest.raises(LayoutError, match="set PDSTORE_LAYER_RANGES=12 on P and on D"):
        in_two_stages()
    assert in_two_stages(layer_ranges=12).num_stages == 2


PATIENT = {
    "PDSTORE_LAYER_RANGES": "2",  # one for each stage: the checkpoint has two layers
    "PDSTORE_DEADLINE_S": "20",  # beside a first forward, which takes seconds
    "PDSTORE_HANDOFF_WAIT_S": "20",
}


@pytest.fixture(scope="module")
def gate(started_pair):
    """Before the pool of the server with stages."""
    gate = Gate(started_pair.redis.port)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def servers(gate, started_pair, launcher, checkpoints):
    """One of two pipeline stages, and one without stages; both are P and D."""
    model, pool = checkpoints("llama"), started_pair.redis.url
    options = (*CACHING, "--pipeline-parallel-size=2")
    staged = launcher.vllm("staged", model, *options, env=switched_on(gate.url) | PATIENT)
    plain = launcher.vllm("plain", model, *CACHING, env=switched_on(pool) | PATIENT)
    yield staged.wait_ready(), plain.wait_ready()
    for server in (staged, plain):
        server.stop()


@pytest.mark.nightly  # vLLM's stages spin while they wait: on two cores nothing else gets on
def test_p_and_d_hand_over_whichever_has_stages(servers):
    staged, plain = servers
    for p, d in ((staged, plain), (plain, staged)):
        prompt = new_prompt(LONG)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        assert answer.num_cached == LONG
        answer.assert_same(alone(plain, prompt))
        assert_idle(p)
        assert_idle(d)


@pytest.mark.nightly
def test_d_computes_what_a_killed_stage_of_p_did_not_store(servers, gate):
    """The last one that uses the server with stages."""
    staged, plain = servers
    prompt = new_prompt(LONG)
    gate.hold(SAVE)
    params = prefill(staged, prompt)
    eventually(lambda: len(gate.held) >= 2, 30)
    [pid, *_] = re.findall(r"\(Worker_PP1 pid=(\d+)\)", staged.log.read_text())
    os.kill(int(pid), signal.SIGKILL)
    gate.release()
    since = Since(plain)
    ask(plain, prompt, kv_transfer_params=params).assert_same(alone(plain, prompt))
    reasons = ("handoff_dead", "handoff_gone", "handoff_late", "handoff_failed")
    assert sum(since[f"pdstore_misses_total:{reason}"] for reason in reasons) == 1
