"""Admission refuses a save where the oldest value is nearer to its next use, and nowhere else."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from pdstore.worker.admission import Admission
from tests.support.clock import Clock


def names_of(number, count=20):
    return [sha256(b"%d %d" % (number, i)).digest()[:16] for i in range(count)]


def ask_in_turn(admission, clock, users, *, first=0, turns=12, step_s=1.0):
    """Each user's blocks are used once a round; nothing of them stays in the pool."""
    for _ in range(turns):
        for user in range(first, first + users):
            clock.now += step_s
            admission.saved(names_of(user))


@pytest.fixture
def clock():
    return Clock()


def test_what_is_used_in_turn_stays_until_it_is_older_than_its_next_use(clock):
    admission = Admission(clock)
    ask_in_turn(admission, clock, 30)
    assert [admission.admits(age) for age in (15.0, 28.0, 45.0, 1e6)] == [False, False, True, True]


def test_what_is_used_again_at_once_or_never_makes_plain_lru(clock):
    admission, chance = Admission(clock), random.Random(1)
    for number in range(400):
        clock.now += 1.0
        admission.saved(names_of(number))
        if chance.random() < 0.5:
            clock.now += 2.0
            admission.found(names_of(number))
    assert all(admission.admits(age) for age in (0.0, 1.0, 10.0, 100.0, 1e5))


def test_nothing_is_refused_before_anything_is_known(clock):
    assert Admission(clock).admits(0.0)


def test_another_pace_is_learnt(clock):
    admission = Admission(clock)
    ask_in_turn(admission, clock, 30)
    ask_in_turn(admission, clock, 30, first=100, turns=30, step_s=10.0)
    assert [admission.admits(age) for age in (45.0, 250.0, 450.0)] == [False, False, True]


def test_a_hot_prefix_and_pairs_of_requests_do_not_hide_a_cycle(clock):
    admission, system = Admission(clock), names_of(-1)
    for _ in range(12):
        for user in range(30):
            clock.now += 1.0
            admission.found(system)
            admission.saved(names_of(user))
            clock.now += 0.1
            admission.found(names_of(user))
    assert not admission.admits(20.0)


def test_many_names_are_learnt_from_by_a_sample(clock):
    admission = Admission(clock)
    for _ in range(4):
        for user in range(300):
            clock.now += 1.0
            admission.saved(names_of(user, 100))
            assert admission.num_samples <= 5_000
    assert [admission.admits(age) for age in (200.0, 400.0)] == [False, True]
