"""Pulses: a silent instance ends all of its waits and no other's."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import RING, SILENCE_S, Handoff, HandoffId, beat_key
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Namespace, Part
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.marker_wait import MarkerWait
from pdstore.scheduler.pulses import Pulses
from tests.support.clock import Clock

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
ALIVE, DEAD = "a" * 32, "d" * 32
STEP_S = 0.1


def wait_for(instance: str | None) -> MarkerWait:
    handoff = Handoff(HandoffId.new(instance))
    lookup = Lookup(PromptKeys(NAMESPACE), handoff, 60.0, lambda match: None)
    return MarkerWait(lookup, handoff, NAMESPACE)


class Rig:
    """Pulses on a clock that a test moves; one instance beats."""

    def __init__(self):
        self.clock, self.number = Clock(), 0
        self.pulses = Pulses(NAMESPACE, clock=self.clock)

    def add(self, *instances: str | None) -> list[MarkerWait]:
        waits = [wait_for(instance) for instance in instances]
        for wait in waits:
            self.pulses.add(wait)
        return waits

    def look(self, seconds: float) -> list[MarkerWait]:
        """Looks for so long; returns the waits that are dead at the end."""
        dead = []
        for _ in range(round(seconds / STEP_S)):
            self.clock.now += STEP_S
            self.number += 1
            dead = self.pulses.note({beat_key(NAMESPACE, ALIVE, self.number)}, self.clock.now)
        return dead


@pytest.fixture
def rig():
    return Rig()


def test_the_waits_of_a_silent_instance_are_dead_and_no_others(rig):
    dead = [rig.add(*instances)[1] for instances in [(ALIVE, DEAD), (None, DEAD)]]
    assert rig.look(SILENCE_S - STEP_S) == []
    assert rig.look(2 * STEP_S) == dead


def test_all_waits_of_an_instance_want_the_same_few_keys(rig):
    waits = rig.add(*[ALIVE] * 1000, None)
    assert len(rig.pulses.wanted()) == RING
    for wait in waits:
        rig.pulses.remove(wait)
    assert rig.pulses.wanted() == []


def test_a_new_wait_says_that_its_instance_lives(rig):
    rig.add(DEAD)
    assert rig.look(SILENCE_S - STEP_S) == []
    rig.add(DEAD)
    assert rig.look(SILENCE_S - STEP_S) == []
    assert len(rig.look(3 * STEP_S)) == 2


def test_a_wait_that_is_removed_twice_leaves_the_others(rig):
    first, second = rig.add(DEAD, DEAD)
    rig.pulses.remove(first)
    rig.pulses.remove(first)
    assert rig.look(2 * SILENCE_S) == [second]
