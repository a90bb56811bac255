"""Pulse: a beat is news, whenever it is seen; silence counts only while somebody looks."""

from __future__ import annotations

import pytest

from pdstore.format.keys import Kind, kind_of
from pdstore.format.namespace import Namespace, Part
from pdstore.format.pulse import RING, Pulse, beat_key, is_beat
from tests.support.clock import Clock

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
INSTANCE = "ab" * 16
SILENCE_S = 1.5


@pytest.fixture
def clock():
    return Clock(now=100.0)


@pytest.fixture
def pulse(clock):
    return Pulse(NAMESPACE, INSTANCE, silence_s=SILENCE_S, clock=clock)


def stored_after(number: int):
    """The ring after so many beats: the last two."""
    return {beat_key(NAMESPACE, INSTANCE, n) for n in range(max(0, number - 2), number)}


def look(pulse, clock, stored, seconds=0.1):
    """Looks for so many seconds, ten times a second."""
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        pulse.note(stored, clock.now)


def test_a_watch_may_begin_at_any_beat(clock):
    for number in range(RING, 2 * RING):
        pulse = Pulse(NAMESPACE, INSTANCE, silence_s=SILENCE_S, clock=clock)
        look(pulse, clock, stored_after(number), seconds=1.0)
        look(pulse, clock, stored_after(number + 1), seconds=1.0)
        assert not pulse.is_silent()


@pytest.mark.parametrize("missed", [2, 3])
def test_beats_that_nobody_looked_for_do_not_hide_the_next(pulse, clock, missed):
    look(pulse, clock, stored_after(5), seconds=1.0)
    look(pulse, clock, stored_after(5 + missed), seconds=1.0)
    assert not pulse.is_silent()


@pytest.mark.parametrize(
    "left",
    [
        pytest.param({4, 5, 6}, id="before the old one was removed"),
        pytest.param({0, 1, 2, 3}, id="a whole ring"),
        pytest.param({3, 5}, id="after an error of the store"),
    ],
)
def test_what_a_dead_instance_has_left_is_no_beat(pulse, clock, left):
    """P is killed between two calls of the store; D looks again and again for what is wanted."""
    look(pulse, clock, stored_after(6))
    stored = {beat_key(NAMESPACE, INSTANCE, n) for n in left}
    for _ in range(30):
        look(pulse, clock, stored & set(pulse.wanted()))
    assert pulse.is_silent()


def test_an_instance_that_beats_is_never_silent(pulse, clock):
    for number in range(30):
        look(pulse, clock, stored_after(number), seconds=1.0)
        assert not pulse.is_silent()


@pytest.mark.parametrize("num_beats", [0, 1, 7])
def test_an_instance_that_stops_is_silent_soon_and_not_before(pulse, clock, num_beats):
    look(pulse, clock, stored_after(num_beats))
    look(pulse, clock, stored_after(num_beats), seconds=SILENCE_S - 0.2)
    assert not pulse.is_silent()
    look(pulse, clock, stored_after(num_beats), seconds=0.4)
    assert pulse.is_silent()


def test_time_in_which_nobody_looked_is_no_silence(pulse, clock):
    look(pulse, clock, stored_after(3))
    clock.now += 60
    look(pulse, clock, stored_after(3), seconds=SILENCE_S - 0.2)
    assert not pulse.is_silent()


def test_whatever_else_is_heard_counts(pulse, clock):
    look(pulse, clock, stored_after(1), seconds=1.4)
    pulse.hear(clock.now)
    look(pulse, clock, stored_after(1), seconds=1.0)
    assert not pulse.is_silent()


def test_beats_live_as_long_as_markers_and_are_told_from_them():
    key = beat_key(NAMESPACE, INSTANCE, RING + 1)
    assert kind_of(key) is Kind.HANDOFF
    assert key == beat_key(NAMESPACE, INSTANCE, 1)
    assert is_beat(key)
    assert not is_beat(key.replace(":beat", ":done"))
