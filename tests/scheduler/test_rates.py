"""Rates: seconds for each token, by size, from the latest measurements."""

from __future__ import annotations

import pytest

from pdstore.scheduler.rates import CostTable, LoadRate, PrefillRate
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_known_before_a_measurement(clock):
    assert CostTable(clock).per_token(1000) is None
    assert LoadRate(clock).seconds(1000) is None
    assert PrefillRate(clock).seconds(0, 1000) is None


def test_a_size_costs_what_the_nearest_measured_one_costs(clock):
    table = CostTable(clock)
    table.note(2048, 1000, 1.0)
    table.note(1 << 20, 1000, 5.0)
    assert table.per_token(100) == table.per_token(3000) == pytest.approx(0.001)
    assert table.per_token(1 << 19) == table.per_token(1 << 30) == pytest.approx(0.005)


def test_later_measurements_count_more(clock):
    table = CostTable(clock)
    table.note(2048, 1000, 1.0)
    for _ in range(20):
        table.note(2048, 1000, 3.0)
    assert table.per_token(2048) == pytest.approx(0.003, rel=0.02)


def test_measurements_of_long_ago_count_no_more(clock):
    table = CostTable(clock, stale_s=10.0)
    table.note(1 << 20, 1000, 5.0)
    clock.now += 11
    table.note(2048, 1000, 1.0)
    assert table.per_token(1 << 20) == pytest.approx(0.001)


def warm_rate(clock):
    """Returns one that has seen its first load, which is not counted."""
    rate = LoadRate(clock)
    rate.started(1)
    clock.now += 100.0
    rate.ended(1, 1)
    return rate


def test_the_first_load_is_not_counted(clock):
    """A first load makes the connections."""
    rate = warm_rate(clock)
    assert rate.seconds(1000) is None
    rate.started(1000)
    clock.now += 1.0
    rate.ended(1000, 1000)
    assert rate.seconds(1000) == pytest.approx(1.0)


@pytest.mark.parametrize("order", ["one after the other", "evenly"])
def test_loads_that_share_a_store_are_measured_together(clock, order):
    """Four loads at 1,000 tokens a second, whichever the store serves first."""
    rate = warm_rate(clock)
    for _ in range(4):
        rate.started(1000)
    for i in range(4):
        if order == "evenly":
            clock.now += 4.0 if i == 0 else 0.0
        else:
            clock.now += 1.0
        rate.ended(1000, 1000)
    assert rate.seconds(1000) == pytest.approx(1.0)
    rate.started(3000)
    assert rate.seconds(1000) == pytest.approx(4.0)  # it waits for those before it


def test_a_store_that_is_never_idle_is_measured_all_the_same(clock):
    rate = warm_rate(clock)
    rate.started(1000)
    for _ in range(20):
        rate.started(1000)
        clock.now += 1.0
        rate.ended(1000, 1000)
    assert rate.seconds(0) == pytest.approx(1.0, rel=0.2)


def test_a_load_that_brings_nothing_costs_its_time(clock):
    rate = warm_rate(clock)
    for num_brought in (1000, 0):
        rate.started(1000)
        clock.now += 1.0
        rate.ended(1000, num_brought)
    assert rate.seconds(1000) == pytest.approx(2.0, rel=0.3)


def test_a_load_that_was_given_up_says_nothing(clock):
    rate = warm_rate(clock)
    rate.started(1000)
    clock.now += 100
    rate.dropped(1000)
    assert rate.seconds(1000) is None


def test_of_loads_that_follow_only_the_time_at_work_counts(clock):
    """Four at once wait for P for a minute, and for the store for half a second each."""
    rate = warm_rate(clock)
    for _ in range(4):
        rate.started(1000, follows=True)
    rate.started(1000)
    clock.now += 1.0
    rate.ended(1000, 1000)
    assert rate.seconds(0) == pytest.approx(4.0), "what follows holds up no other measurement"
    clock.now += 60.0
    for _ in range(4):
        rate.followed(1000, 1000, busy_s=0.5)
    assert rate.seconds(4000) == pytest.approx(2.0)


def test_loads_that_follow_share_the_time_that_all_took(clock):
    rate = warm_rate(clock)
    for _ in range(4):
        rate.started(1000, follows=True)
    clock.now += 2.0
    for _ in range(4):
        rate.followed(1000, 1000, busy_s=2.0)
    assert rate.seconds(4000) == pytest.approx(2.0)


def test_a_prefill_is_measured_by_position(clock):
    rate = PrefillRate(clock)
    rate.note_step([(0, 8192)], 0.8192)
    rate.note_step([(8192, 16_384)], 2 * 0.8192)
    assert rate.seconds(0, 16_384) == pytest.approx(3 * 0.8192)
    assert rate.seconds(8192, 8193) == pytest.approx(0.0002)
    assert rate.seconds(5, 5) == 0


def test_positions_are_known_once_half_of_them_were_measured(clock):
    rate = PrefillRate(clock)
    rate.note_step([(900, 1024)], 0.1)
    assert not rate.is_known(0, 1024)
    rate.note_step([(0, 4096)], 0.4)
    assert rate.is_known(0, 4096)
    assert not rate.is_known(0, 8192)


@pytest.mark.parametrize("chunk", [64, 512])
def test_positions_that_were_measured_once_stay_known_however_small_the_steps(clock, chunk):
    rate = PrefillRate(clock)
    for start in range(0, 16_384, chunk):
        rate.note_step([(start, start + chunk)], 0.1)
    assert rate.is_known(0, 16_384)
    for _ in range(20):  # the ends of later prompts
        rate.note_step([(12_000, 12_064)], 0.1)
    assert rate.is_known(0, 16_384)


def test_steps_of_a_few_tokens_tell_the_fixed_part_of_a_step(clock):
    rate = PrefillRate(clock)
    rate.note_step([(99, 100)], 0.01)
    rate.note_step([(0, 500), (0, 500)], 0.11)
    assert rate.seconds_beside(0, 1000) == pytest.approx(0.1)
    assert rate.seconds(0, 1000) == pytest.approx(0.11)
    assert rate.seconds(0, 2000) == pytest.approx(0.22)
    rate.note_step([], 5.0)
    assert rate.seconds(0, 1000) == pytest.approx(0.11)
