"""PromptTimes: loads what is quicker to load, and computes what is quicker to compute."""

from __future__ import annotations

import pytest

from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import PromptTimes
from tests.support.clock import Clock
from tests.support.machine import Store, p99_of

TOKENS = 8192


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def finish(clock):
    """Loads and computes a decided prompt, at so many tokens a second; tells the way it went."""

    def finish(times, name, load_rate, prefill_rate):
        decision = ask(times, name)
        if decision.num_tokens:
            clock.now += (seconds := decision.num_tokens / load_rate)
            times.load_ended(name, decision.num_tokens, seconds)
        start = min(decision.num_tokens, TOKENS - 1)
        times.begin_step(name, start, TOKENS)
        clock.now += (TOKENS - start) / prefill_rate
        times.end_prompt(name)
        return decision.way

    return finish


@pytest.fixture
def open_break_even(clock, finish):
    """Makes one that has measured both rates, in tokens a second."""

    def open_one(load_rate, prefill_rate, **more):
        times = PromptTimes("auto", 64, clock=clock, **more)
        ways = [finish(times, name, load_rate, prefill_rate) for name in range(3)]
        assert ways == ["load", "load", "compute"]  # a store's first load tells little
        return times

    return open_one


def ask(times, name="a", found=TOKENS, num_tokens=TOKENS, start=0):
    return times.decide(name, start=start, found=found, num_tokens=num_tokens)


@pytest.mark.parametrize(("load_rate", "way"), [(100_000, "load"), (5000, "compute")])
def test_the_quicker_way_is_taken(open_break_even, load_rate, way):
    assert ask(open_break_even(load_rate, 20_000)).way == way


def test_never_computes(clock, finish):
    times = PromptTimes("never", 64, clock=clock)
    assert [finish(times, name, 1e6, 1000) for name in range(3)] == ["compute"] * 3


def test_of_many_prompts_that_nothing_is_known_for_half_are_loaded(clock):
    times = PromptTimes("auto", 64, clock=clock)
    assert [ask(times, name).way for name in range(4)] == ["load", "compute"] * 2


def test_the_slower_way_relieves_a_long_queue_of_the_other(open_break_even):
    times = open_break_even(15_000, 20_000)
    ways = [ask(times, name).way for name in range(12)]
    assert ways[0] == "compute"
    assert 2 <= ways.count("load") <= 5


def test_loads_that_share_the_store_do_not_make_it_look_slow(open_break_even, clock, finish):
    times = open_break_even(100_000, 20_000)
    assert [ask(times, name).way for name in range(8)] == ["load"] * 8
    clock.now += 8 * TOKENS / 100_000
    for name in range(8):
        times.load_ended(name, TOKENS, 8 * TOKENS / 100_000)
        times.forget(name)
    assert finish(times, "next", 100_000, 20_000) == "load"


def test_a_store_that_has_become_fast_is_noticed(open_break_even, finish):
    times = open_break_even(1000, 20_000, probe_every=10)
    ways = [finish(times, name, 1e6, 20_000) for name in range(20)]
    assert ways == ["compute"] * 9 + ["both"] + ["load"] * 10


def test_a_decision_is_counted_when_its_prompt_is_there(open_break_even):
    metrics = Metrics()
    times = open_break_even(100_000, 20_000, metrics=metrics)
    ask(times)
    times.load_ended("a", TOKENS, 0.1)
    times.begin_step("a", TOKENS - 1, TOKENS)
    value = metrics.registry.get_sample_value
    assert value("pdstore_decisions_total", {"way": "load"}) == 2
    times.end_prompt("a")
    assert value("pdstore_decisions_total", {"way": "load"}) == 3


def test_a_request_that_ended_is_nobodys_backlog(open_break_even):
    times = open_break_even(15_000, 20_000)
    for name in range(8):
        ask(times, name)
        times.forget(name)
    assert ask(times).way == "compute"


@pytest.mark.parametrize(
    ("store_gb_s", "at_once"), [(0.1, 1), (0.1, 8), (2.5, 1), (2.5, 8), (25.0, 1), (25.0, 32)]
)
def test_auto_is_within_five_percent_of_the_better_way(store_gb_s, at_once):
    cell = (Store("a store", store_gb_s, 0.002), at_once, [TOKENS], 0.02)
    load, compute, auto = (p99_of(way, *cell) for way in ("always", "never", "auto"))
    assert auto <= 1.05 * min(load, compute)


@pytest.mark.parametrize(("store_gb_s", "at_once"), [(1.0, 8), (2.5, 1), (2.5, 8), (25.0, 8)])
def test_auto_is_as_near_where_each_load_brings_a_state_as_large_as_6000_tokens(
    store_gb_s, at_once
):
    """With few tokens it costs more than they do, with many less: auto knows only an average."""
    cell = (Store("a store", store_gb_s, 0.002), at_once, [2048, TOKENS], 0.02, 6000)
    load, compute, auto = (p99_of(way, *cell) for way in ("always", "never", "auto"))
    assert auto <= 1.05 * min(load, compute)
