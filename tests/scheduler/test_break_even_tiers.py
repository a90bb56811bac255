"""PromptTimes over tiers: each has its own cost, and a slow one is left out where it pays."""

from __future__ import annotations

from timeit import repeat
from types import SimpleNamespace

import pytest

from pdstore.scheduler.break_even import PromptTimes
from pdstore.store.tier_spans import TierSpan
from tests.support.clock import Clock

TOKENS = 8192
HALF = TOKENS // 2
FAST, SLOW, PREFILL = 200_000, 4_000, 20_000  # tokens a second
RATES = {0: FAST, 1: SLOW, 2: SLOW / 4}


def spans(*parts):
    """Spans of (tier, number of tokens), one after the other."""
    made, start = [], 0
    for tier, count in parts:
        made.append(TierSpan(tier, start, start + count))
        start += count
    return made


def by_tier(found, end):
    counts = {}
    for tier, start, stop in found:
        if (count := min(stop, end) - start) > 0:
            counts[tier] = counts.get(tier, 0) + count
    return counts


class Bench:
    """An engine and a store of tiers in simulated time; a prompt comes when the last is there."""

    def __init__(self, **more):
        self.clock = Clock()
        self.times = PromptTimes("auto", 64, clock=self.clock, **more)
        self.rates = dict(RATES)
        self.number = 0

    def ask(self, *parts):
        self.number += 1
        found = spans(*parts)
        num_tokens = found[-1].stop
        decided = self.times.decide(
            self.number, start=0, found=num_tokens, num_tokens=num_tokens + 1, spans=found
        )
        return found, decided

    def run(self, *parts):
        """Serves one prompt whose parts lie in these tiers; returns the tokens it has loaded."""
        found, decided = self.ask(*parts)
        end, num_tokens = decided.num_tokens, found[-1].stop + 1
        if end:
            counts = by_tier(found, end)
            self.clock.now += (seconds := self.seconds(counts))
            self.times.load_ended(self.number, end, seconds, counts)
        self.times.begin_step(self.number, end, num_tokens)
        self.clock.now += (num_tokens - end) / PREFILL
        self.times.end_prompt(self.number)
        return end

    def seconds(self, counts):
        return sum(count / self.rates[tier] for tier, count in counts.items())

    def learn(self, *tiers):
        """Measures the cost of each tier, and of computing."""
        self.run((0, TOKENS))  # a store's first load tells little
        for tier in tiers:
            assert self.run((tier, TOKENS)) == TOKENS, "what is not known is measured"
            self.run((tier, TOKENS))
        return self


@pytest.fixture
def bench():
    return Bench


def test_one_slow_load_does_not_spoil_the_estimate_of_memory(bench):
    one = bench().learn(0, 1)
    assert one.run((1, TOKENS)) == 0
    assert one.run((0, TOKENS)) == TOKENS


def test_a_prompt_is_loaded_up_to_where_the_slow_disk_begins(bench):
    one = bench().learn(0, 1)
    assert one.run((0, HALF), (1, HALF)) == HALF
    assert one.ask((0, HALF), (1, HALF))[1].way == "both"


def test_a_fast_part_behind_a_slow_one_is_loaded_if_both_together_pay(bench):
    one = bench().learn(0, 1)
    little, much = 640, 100 * 640
    assert one.run((1, little), (0, much)) == little + much
    assert one.run((1, HALF), (0, 640)) == 0


def test_where_a_prompt_cannot_be_split_all_of_it_is_loaded_or_nothing(bench):
    one = bench(may_split=False).learn(0, 1)
    assert one.run((0, HALF), (1, HALF)) == 0
    assert one.run((0, 20 * HALF), (1, 640)) == 20 * HALF + 640


def test_of_three_tiers_those_are_loaded_that_pay(bench):
    one = bench()
    one.rates[1] = FAST / 2
    one.learn(0, 1, 2)
    assert one.run((0, HALF), (1, HALF), (2, HALF)) == 2 * HALF


def test_a_mixed_load_measures_the_tier_that_is_not_known_yet(bench):
    one = bench().learn(0)
    assert one.run((0, HALF), (1, HALF)) == TOKENS, "it is not known"
    assert one.run((0, HALF), (1, HALF)) == HALF
    assert one.run((0, TOKENS)) == TOKENS


def test_mixed_loads_tell_a_disk_that_has_become_slow(bench):
    one = bench()
    one.rates[1] = FAST / 2
    one.learn(0, 1)
    assert one.run((0, HALF), (1, HALF)) == TOKENS
    one.rates[1] = SLOW
    ends = [one.run((0, HALF), (1, HALF)) for _ in range(10)]
    assert ends[-1] == HALF
    assert one.run((0, TOKENS)) == TOKENS, "memory is not blamed for it"


def test_a_disk_that_has_become_fast_is_noticed(bench):
    one = bench(probe_every=10).learn(0, 1)
    one.rates[1] = FAST / 2
    ends = [one.run((0, HALF), (1, HALF)) for _ in range(20)]
    assert ends[0] == HALF
    assert ends[-1] == TOKENS
    assert len([end for end in ends if HALF < end < TOKENS]) == 1, "one probe is enough"


def test_of_many_at_once_one_measures_a_tier_that_is_not_known(bench):
    one = bench().learn(0)
    ends = [one.ask((0, HALF), (1, HALF))[1].num_tokens for _ in range(4)]
    assert ends == [TOKENS, HALF, HALF, HALF]


def test_loads_at_the_same_time_are_one_measurement_of_each_tier(bench):
    one = bench()
    one.rates[1] = FAST / 2
    one.learn(0, 1)
    asked = [one.ask((0, HALF), (1, HALF)) for _ in range(4)]
    assert [decided.num_tokens for _, decided in asked] == [TOKENS] * 4
    counts = by_tier(asked[0][0], TOKENS)
    one.clock.now += (seconds := 4 * one.seconds(counts))
    for number in range(one.number - 3, one.number + 1):
        one.times.load_ended(number, TOKENS, seconds, counts)
        one.times.forget(number)
    assert one.run((0, HALF), (1, HALF)) == TOKENS


@pytest.mark.parametrize("counts", [None, {}, {0: 0, 1: 0}])
def test_a_load_that_brought_nothing_measures_nothing(bench, counts):
    one = bench().learn(0, 1)
    one.ask((0, TOKENS))
    one.clock.now += 5
    one.times.load_ended(one.number, 0, 5.0, counts)
    one.times.forget(one.number)
    assert one.run((0, TOKENS)) == TOKENS


def test_where_nothing_tells_the_tiers_of_a_load_the_plan_does(bench):
    one = bench().learn(0, 1)
    assert one.ask((0, HALF), (1, HALF))[1].num_tokens == HALF
    one.clock.now += HALF / FAST
    one.times.load_ended(one.number, HALF, HALF / FAST)
    one.times.forget(one.number)
    assert one.run((0, HALF), (1, HALF)) == HALF


def test_many_prompts_cost_a_decision_little():
    times = PromptTimes("auto", 64)
    for number in range(2000):
        times.decide(number, start=0, found=512, num_tokens=1024)
    prompts = [SimpleNamespace(at=0, num_tokens=1024) for _ in range(2000)]

    def add_up():
        return sum(prompt.num_tokens - prompt.at for prompt in prompts)

    def decide():
        times.decide("one more", start=0, found=512, num_tokens=1024)

    assert min(repeat(decide, number=1, repeat=50)) < 12 * min(repeat(add_up, number=1, repeat=50))
