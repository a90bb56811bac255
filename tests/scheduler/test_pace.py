"""Pace: quick after news, slow without, within its rate and its share of the time."""

from __future__ import annotations

import pytest

from pdstore.scheduler.pace import Pace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_pauses_grow_up_to_the_longest_and_news_make_them_short_again(clock):
    pace = Pace(first_s=1.0, last_s=1.5, calls_per_s=None, clock=clock)
    assert [pace.after(1, 0.0) for _ in range(4)] == pytest.approx([1.0, 1.3, 1.5, 1.5])
    pace.hurry()
    assert pace.after(1, 0.0) == 1.0


def test_on_average_there_are_no_more_calls_than_the_rate_whatever_the_news(clock):
    pace = Pace(first_s=0.001, calls_per_s=200.0, burst=20, clock=clock)
    num_calls = 0
    while clock.now < 110.0:
        pace.hurry()  # somebody has news all the time
        if not pace.blocked_s():
            pace.after(1, 0.0)
            num_calls += 1
        clock.now += 0.0005
    assert 1990 <= num_calls <= 2021


def test_a_burst_is_not_held_up(clock):
    pace = Pace(first_s=0.001, calls_per_s=200.0, burst=20, clock=clock)
    for _ in range(20):
        assert pace.blocked_s() == 0.0
        pace.after(1, 0.0)
    pace.after(1, 0.0)
    assert pace.blocked_s() > 0


@pytest.mark.parametrize(("share", "rest_s"), [(4, 0.3), (2, 0.1)])
def test_slow_calls_take_a_share_of_the_time_at_most(clock, share, rest_s):
    pace = Pace(first_s=0.001, calls_per_s=None, share=share, clock=clock)
    assert pace.after(1, took_s=0.1) == pytest.approx(rest_s)
    pace.hurry()
    assert pace.blocked_s() == pytest.approx(rest_s)
    clock.now += rest_s
    assert pace.blocked_s() == pytest.approx(0.0, abs=1e-9)
