"""PromptTimes: loads what is quicker to load, and computes what is quicker to compute."""

from __future__ import annotations

import pytest

from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import PromptTimes
from tests.support.clock import Clock

TOKENS = 8192


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_break_even(clock):
    """Makes one that has measured both rates, in tokens a second."""

    def open_one(load_rate, prefill_rate, mode="auto", **more):
        found = PromptTimes(mode, 64, clock=clock, **more)
        for name in ("learn", "learn again"):
            found.decide(name, start=0, found=TOKENS, num_tokens=TOKENS)
            clock.now += TOKENS / load_rate
            found.load_ended(name, TOKENS)
            clock.now += TOKENS / prefill_rate
            found.computed([(name, 0, TOKENS)], TOKENS / prefill_rate)
        return found

    return open_one


def ask(break_even, name="a", found=TOKENS, num_tokens=TOKENS, start=0):
    return break_even.decide(name, start=start, found=found, num_tokens=num_tokens)


@pytest.mark.parametrize(("load_rate", "way"), [(100_000, "load"), (5000, "compute")])
def test_the_quicker_way_is_taken_and_both_estimates_are_told(open_break_even, load_rate, way):
    decision = ask(open_break_even(load_rate, 20_000))
    assert decision.way == way
    assert decision.load_s == pytest.approx(TOKENS / load_rate, rel=0.05)
    assert decision.compute_s == pytest.approx(TOKENS / 20_000, rel=0.05)


@pytest.mark.parametrize(("mode", "way"), [("always", "load"), ("never", "compute")])
def test_always_and_never_ask_no_estimate(open_break_even, mode, way):
    for rate in (100_000, 5000):
        decision = ask(open_break_even(rate, 20_000, mode))
        assert decision[1:] == (way, None, None)


def test_the_prefill_is_learned_by_one_prompt_at_a_time(clock):
    break_even = PromptTimes("auto", 64, clock=clock)
    for name in ("warm-up", "first"):
        ask(break_even, name)
        clock.now += 1.0
        break_even.load_ended(name, TOKENS)
    assert ask(break_even, "second").way == "both"
    assert ask(break_even, "third").way == "load"


def test_a_prefill_that_may_be_quicker_is_tried_once(clock):
    """A tail alone looks three times as dear as a prompt: steps have a fixed part."""
    break_even = PromptTimes("auto", 64, clock=clock)
    for name in ("warm-up", "first"):
        ask(break_even, name)
        clock.now += 1.0
        break_even.load_ended(name, TOKENS)
    break_even.computed([("first", TOKENS - 1024, TOKENS)], 0.2)
    assert ask(break_even, "second").way == "compute"
    assert ask(break_even, "third").way == "load"


def test_a_store_that_has_become_fast_is_noticed(open_break_even, clock):
    break_even = open_break_even(1000, 20_000, probe_every=10)
    ways = []
    for name in range(40):
        decision = ask(break_even, name)
        ways.append(decision.way)
        clock.now += max(4.0, decision.num_tokens / 1e6)
        if decision.num_tokens:
            clock.now -= 4.0 - decision.num_tokens / 1e6
            break_even.load_ended(name, decision.num_tokens)
        stop, seconds = TOKENS, (TOKENS - decision.num_tokens) / 20_000
        break_even.computed([(name, min(decision.num_tokens, TOKENS - 1), stop)], seconds)
    assert ways[:8] == ["compute"] * 8
    assert ways[-10:] == ["load"] * 10


def test_a_load_that_waits_for_p_does_not_make_the_store_slow(open_break_even, clock):
    break_even = open_break_even(100_000, 20_000)
    before = ask(break_even, "before").load_s
    break_even.forget("before")
    for name in range(8):  # P computes each for longer than D would
        follow = {"start": 0, "found": TOKENS, "num_tokens": TOKENS, "follows": True}
        assert break_even.decide(name, **follow).way == "load"
        clock.now += 1.0
        break_even.load_ended(name, TOKENS)
        break_even.computed([(name, TOKENS - 1, TOKENS)], 0.001)
    decision = ask(break_even)
    assert (decision.way, decision.load_s) == ("load", pytest.approx(before, rel=0.1))


def test_a_decision_is_counted_when_its_prompt_is_there(open_break_even):
    metrics = Metrics()
    break_even = open_break_even(100_000, 20_000, metrics=metrics)
    ask(break_even)
    break_even.load_ended("a", TOKENS)
    value = metrics.registry.get_sample_value
    assert value("pdstore_decisions_total", {"way": "load"}) == 2
    break_even.computed([("a", TOKENS - 1, TOKENS)], 0.001)
    assert value("pdstore_decisions_total", {"way": "load"}) == 3


def test_a_request_that_ended_is_nobodys_backlog(open_break_even):
    break_even = open_break_even(5000, 20_000)
    alone = ask(break_even, "a").compute_s
    assert ask(break_even, "b").compute_s > 1.5 * alone
    break_even.forget("a")
    assert ask(break_even, "b").compute_s == pytest.approx(alone)
