"""PromptTimes: the time until a request has its first token belongs to its prompt."""

from __future__ import annotations

import pytest

from pdstore import EngineRequest, HandoffId, PromptTimes, Reason, SavePlan
from pdstore.format.plan import Announcement
from tests.support.clock import Clock
from tests.support.instances import instance as instance
from tests.support.instances import store as store
from tests.support.kv import eventually, settings_of

TOKENS = range(1, 1001)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=[("load", 1100), ("compute", 900)], ids=["faster", "slower"])
def prompt_times(request, clock):
    """Two that know their store: it brings more, or fewer, than 1,000 tokens a second."""
    way, rate = request.param
    times = PromptTimes("auto", 64, clock=clock)
    for name in ("first", "second"):
        times.decide(name, start=0, found=1000, num_tokens=1000)
        clock.now += 1000 / rate
        times.load_ended(name, 1000, 1000 / rate)
        times.forget(name)
    yield times
    assert times.decide("last", start=0, found=1000, num_tokens=1000).way == way


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


def test_the_time_from_the_first_step_to_the_first_token_is_the_prompts(clock, decided):
    request = decided()
    request.begin_step(0, 600)
    clock.now += 0.6
    request.begin_step(600, 1000)
    clock.now += 0.4
    request.end_prompt()


def test_prompts_that_run_together_share_the_time(clock, decided):
    pair = [decided(), decided()]
    for request in pair:
        request.begin_step(0, 1000)
    clock.now += 2.0
    for request in pair:
        request.end_prompt()


@pytest.mark.parametrize(("load", "end"), [("auto", len(TOKENS)), ("never", 0)])
def test_auto_loads_what_d_follows_whatever_it_costs(instance, load, end):
    p, d = instance(), instance()
    handoff, params = p.cache.announce(p.cache.keys(TOKENS))
    first = SavePlan(p.cache.keys(TOKENS[:64]), announce=Announcement(handoff, len(TOKENS)))
    p.pool.begin_save(first, range(4)).layers_done(len(p.layout.held_layers))
    eventually(lambda: p.store.match([handoff.started(p.namespace)]))
    keys, times = d.cache.keys(TOKENS), PromptTimes("never", 64)
    request = EngineRequest(d.cache, settings_of(load=load), keys, params, prompt_times=times)
    eventually(request.poll)
    assert request.found.follow == handoff
    assert request.find(0, len(TOKENS)) == end


def test_of_a_request_that_must_fail_nothing_is_decided_and_nothing_loaded(instance):
    d, handoff, settings = instance(), HandoffId.new(), settings_of(load="auto", on_miss="fail")
    d.pool.save(d.cache.keys(TOKENS[:128]), range(8)).wait(20)
    d.pool.abort_handoff(handoff).wait(20)
    keys, params = d.cache.keys(TOKENS), {"pdstore": {"attempt": handoff.hex}}
    times = PromptTimes("auto", 64)
    request = EngineRequest(d.cache, settings, keys, params, prompt_times=times)
    eventually(request.poll)
    assert (request.found.num_tokens, request.failure) == (128, Reason.HANDOFF_FAILED)
    assert (request.find(0, len(TOKENS)), request.decided) == (0, {})
