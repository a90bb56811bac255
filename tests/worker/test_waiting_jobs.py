"""WaitingJobs: bounds on the number and the bytes of the jobs that wait, for each direction."""

from __future__ import annotations

import pytest

from pdstore.errors import QueueFull
from pdstore.worker.job_run import Urgency
from pdstore.worker.waiting_jobs import WaitingJobs
from tests.support.jobs import LOAD, SAVE, run_of

KIB = 1024


@pytest.fixture
def waiting() -> WaitingJobs:
    return WaitingJobs(max_jobs=3, max_bytes=10 * KIB)


def job(num_bytes=KIB, direction=SAVE, urgency=Urgency.ORDINARY):
    return run_of(direction=direction, num_bytes=num_bytes, urgency=urgency)


def test_as_many_jobs_wait_as_the_setting_says(waiting):
    assert [waiting.add(job()) for _ in range(3)] == [None] * 3
    assert isinstance(waiting.add(job()), QueueFull)


def test_the_error_says_how_many_wait_and_in_which_direction(waiting):
    for _ in range(3):
        waiting.add(job(direction=LOAD))
    assert "3 load jobs" in str(waiting.add(job(direction=LOAD)))


def test_directions_do_not_fill_each_others_room(waiting):
    for _ in range(3):
        waiting.add(job(direction=SAVE))
    assert waiting.add(job(direction=LOAD)) is None


def test_jobs_that_wait_are_no_larger_together_than_the_setting_says(waiting):
    assert waiting.add(job(6 * KIB)) is None
    assert waiting.add(job(4 * KIB)) is None
    assert isinstance(waiting.add(job(1)), QueueFull)


def test_a_job_larger_than_the_bound_is_taken_alone(waiting):
    assert waiting.add(job(20 * KIB)) is None
    assert isinstance(waiting.add(job(1)), QueueFull)


def test_a_job_that_begins_or_ends_leaves_its_room(waiting):
    large = job(10 * KIB)
    waiting.add(large)
    waiting.discard(large)
    waiting.discard(large)
    assert waiting.add(job(10 * KIB)) is None


def test_a_marker_is_never_refused(waiting):
    for _ in range(3):
        waiting.add(job())
    assert waiting.add(job(0, urgency=Urgency.MARKER)) is None
