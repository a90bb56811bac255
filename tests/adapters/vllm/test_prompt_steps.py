"""PromptSteps: the time until a request has its first token belongs to its prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore.adapters.vllm.prompt_steps import PromptSteps
from pdstore.scheduler.break_even import BreakEven
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def break_even(clock):
    return BreakEven("auto", 64, clock=clock)


def request(name, num_tokens=1000):
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=num_tokens, num_computed_tokens=0, num_output_tokens=0
    )


def decide(break_even, request, found=0):
    num_tokens = request.num_prompt_tokens
    return break_even.decide(request.request_id, start=0, found=found, num_tokens=num_tokens)


def test_the_time_from_the_first_step_to_the_first_token_is_the_prompts(clock, break_even):
    steps, asked = PromptSteps(break_even, clock), request("a")
    decide(break_even, asked)
    steps.scheduled([(asked, 600)])
    clock.now += 0.6
    asked.num_computed_tokens = 600
    steps.scheduled([(asked, 400)])
    assert steps.take_outcomes() == []
    clock.now += 0.4
    asked.num_output_tokens = 1
    [outcome] = steps.take_outcomes()
    assert (outcome.name, outcome.took_s) == ("a", pytest.approx(1.0))
    assert decide(break_even, request("b"), found=512).compute_s == pytest.approx(1.0)


def test_prompts_that_run_together_share_the_time(clock, break_even):
    steps, pair = PromptSteps(break_even, clock), [request("a"), request("b")]
    for asked in pair:
        decide(break_even, asked)
    steps.scheduled([(asked, 1000) for asked in pair])
    clock.now += 2.0
    for asked in pair:
        asked.num_output_tokens = 1
    assert len(steps.take_outcomes()) == 2
    assert decide(break_even, request("c"), found=512).compute_s == pytest.approx(1.0)


def test_an_idle_engine_and_answers_count_for_nothing(clock, break_even):
    steps, asked = PromptSteps(break_even, clock), request("a")
    decide(break_even, asked)
    clock.now += 100
    steps.scheduled([(asked, 1000)])
    clock.now += 1.0
    asked.num_output_tokens, asked.num_computed_tokens = 1, 1000
    steps.take_outcomes()
    for _ in range(10):
        steps.scheduled([(asked, 1)])
        clock.now += 1.0
        assert steps.take_outcomes() == []
    assert decide(break_even, request("b"), found=512).compute_s == pytest.approx(1.0)


def test_a_request_that_ended_early_is_forgotten(clock, break_even):
    steps, asked = PromptSteps(break_even, clock), request("a")
    decide(break_even, asked)
    steps.scheduled([(asked, 1000)])
    steps.forget("a")
    asked.num_output_tokens = 1
    assert steps.take_outcomes() == []
