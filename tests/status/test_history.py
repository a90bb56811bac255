"""History: curves of an hour from counters that the page's thread reads, within fixed memory."""

from __future__ import annotations

import json

import pytest

from pdstore.status.history import EVERY_S, Curve, History
from tests.support.clock import Clock

HITS = Curve("hit rate", ("matched",), of=("requested",))
LOADS = Curve("loaded tokens/s", ("loaded", "loaded_too"))


@pytest.fixture
def numbers():
    return {"matched": 100.0, "requested": 1000.0, "loaded": 0.0, "loaded_too": 0.0, "else": 7.0}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def history(numbers, clock):
    return History([HITS, LOADS], lambda: numbers, clock=clock)


def passing(history, numbers, clock, steps=1, **increases):
    for _ in range(steps):
        clock.now += EVERY_S
        for name, increase in increases.items():
            numbers[name] += increase
        history.add_if_due()


def test_a_share_and_a_rate_by_half_minutes_and_nothing_of_before_it_began(history, numbers, clock):
    passing(history, numbers, clock, requested=100, matched=25)
    passing(history, numbers, clock, requested=100, matched=75, loaded=60, loaded_too=30)
    hits, loads = history.as_json(numbers)
    assert hits["values"] == [0.25, 0.75]
    assert hits["recent"] == 0.5
    assert loads["values"] == [0.0, 90 / EVERY_S]
    assert loads["recent_s"] == 2 * EVERY_S
    assert (hits["is_share"], loads["is_share"]) == (True, False)
    assert json.loads(json.dumps(hits)) == hits


def test_a_share_of_nothing_is_none_and_not_zero(history, numbers, clock):
    passing(history, numbers, clock)
    [hits, _] = history.as_json(numbers)
    assert (hits["values"], hits["recent"]) == ([None], None)


def test_the_last_minutes_are_five_however_old_it_is(history, numbers, clock):
    passing(history, numbers, clock, steps=50, requested=100)
    passing(history, numbers, clock, steps=10, requested=100, matched=90)
    [hits, _] = history.as_json(numbers)
    assert hits["recent"] == pytest.approx(0.9)
    assert hits["recent_s"] == 300


def test_what_has_come_since_the_last_sample_counts_too(history, numbers, clock):
    numbers.update(requested=1100.0, matched=200.0)
    clock.now += 2.0
    assert history.as_json(numbers)[0]["values"] == [], "too little for a point"
    clock.now += 8.0
    [hits, _] = history.as_json(numbers)
    assert hits["values"] == [1.0]
    assert (hits["recent"], hits["recent_s"]) == (1.0, 10.0)


def test_it_reads_only_each_half_minute_and_keeps_an_hour_of_what_it_shows(clock):
    reads = []

    def read():
        reads.append(clock.now)
        return {"loaded": float(len(reads)), "else": 1.0}

    history = History([LOADS], read, clock=clock)
    for _ in range(10 * 3600):
        clock.now += 1.0
        history.add_if_due()
    assert len(reads) == 1 + 10 * 3600 / EVERY_S
    [loads] = history.as_json({"loaded": float(len(reads))})
    assert len(loads["values"]) == 3600 / EVERY_S
    assert set(loads["values"]) == {1 / EVERY_S}
