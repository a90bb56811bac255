"""IdleSteps: workers wait only where vLLM has nothing else to do, and nobody steps with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore.adapters.vllm.idle_steps import IdleSteps


def parallel(data=1, stages=1):
    return SimpleNamespace(data_parallel_size=data, pipeline_parallel_size=stages)


def waits(steps, *nums_tokens, is_asking=False):
    return [steps.wait_s(num, is_asking=is_asking) > 0 for num in nums_tokens]


def test_workers_wait_once_what_was_computed_is_taken_up():
    steps = IdleSteps.of(parallel())
    assert waits(steps, 8, 0, 0, 0, 1, 0, 0) == [False, False, True, True, False, False, True]


def test_every_stage_may_have_a_step_under_way_and_one_more_be_planned():
    assert waits(IdleSteps.of(parallel(stages=4)), 8, 0, 0, 0, 0, 0) == [False] * 5 + [True]


def test_nobody_waits_while_a_lookup_is_under_way():
    assert not any(waits(IdleSteps(), 0, 0, 0, is_asking=True))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_instances_that_step_together_never_wait(num_tokens):
    assert not any(waits(IdleSteps.of(parallel(data=2)), *[num_tokens] * 9))


def test_a_wait_is_shorter_than_a_request_would_notice():
    assert max(IdleSteps().wait_s(0, is_asking=False) for _ in range(9)) <= 0.005
