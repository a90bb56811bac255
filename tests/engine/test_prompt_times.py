"""PromptTimes: the time until a request has its first token belongs to its prompt."""

from __future__ import annotations

import pytest

from pdstore import EngineRequest, PromptTimes
from tests.support.clock import Clock
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of

TOKENS = range(1, 1001)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def prompt_times(clock):
    return PromptTimes("auto", 64, clock=clock)


@pytest.fixture
def decided(instance, prompt_times):
    """Makes a request that is decided; nothing of its prompt is in the pool."""
    cache = instance().cache

    def decided():
        keys = cache.keys(TOKENS)
        request = EngineRequest(cache, settings_of(load="auto"), keys, prompt_times=prompt_times)
        eventually(request.poll)
        request.find(0, len(TOKENS))
        return request

    return decided


def estimate(decided):
    """The seconds that a prompt of this length is expected to take."""
    return decided().decision.compute_s


def test_the_time_from_the_first_step_to_the_first_token_is_the_prompts(clock, decided):
    request = decided()
    request.begin_step(0, 600)
    clock.now += 0.6
    request.begin_step(600, 1000)
    clock.now += 0.4
    request.end_prompt()
    assert estimate(decided) == pytest.approx(1.0)


def test_prompts_that_run_together_share_the_time(clock, decided):
    pair = [decided(), decided()]
    for request in pair:
        request.begin_step(0, 1000)
    clock.now += 2.0
    for request in pair:
        request.end_prompt()
    assert estimate(decided) == pytest.approx(1.0)
