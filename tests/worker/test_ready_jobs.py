"""ReadyJobs: urgency first, then direction, then age or size by the worker's number."""

from __future__ import annotations

import pytest

from pdstore.outcome import Direction
from pdstore.worker.job_run import Urgency
from pdstore.worker.ready_jobs import ReadyJobs
from tests.support.jobs import LOAD, SAVE, Shares, run_of

IDLE = {LOAD: 0, SAVE: 0}


def job(num_shares=1, direction=SAVE, urgency=Urgency.ORDINARY):
    return run_of(Shares(*[lambda child: None] * num_shares), direction, urgency=urgency)


def ready(*runs) -> ReadyJobs:
    jobs = ReadyJobs()
    for run in runs:
        jobs.add(run)
    return jobs


def test_nothing_is_chosen_from_nothing():
    assert ready().choose(2, IDLE) is None


@pytest.mark.parametrize(("worker", "direction"), [(0, LOAD), (1, SAVE)])
def test_a_kept_worker_serves_its_direction_alone(worker, direction):
    runs = {each: job(direction=each) for each in Direction}
    jobs = ready(*runs.values())
    assert jobs.choose(worker, IDLE) is runs[direction]
    jobs.discard(runs[direction])
    assert jobs.choose(worker, IDLE) is None


@pytest.mark.parametrize(
    ("num_busy", "direction"), [((0, 0), LOAD), ((2, 1), SAVE), ((1, 2), LOAD)]
)
def test_the_others_help_the_direction_that_fewer_serve(num_busy, direction):
    runs = {each: job(direction=each) for each in Direction}
    busy = dict(zip((LOAD, SAVE), num_busy, strict=True))
    assert ready(*runs.values()).choose(2, busy) is runs[direction]


def test_urgency_comes_before_age_size_and_direction():
    runs = [job(1, LOAD), job(9, SAVE, Urgency.HANDOFF), job(9, SAVE, Urgency.MARKER)]
    jobs = ready(*runs)
    for run in reversed(runs):
        assert jobs.choose(2, IDLE) is run
        jobs.discard(run)


def test_even_workers_take_the_oldest_and_odd_ones_the_smallest():
    old, small = job(9), job(2)
    jobs = ready(old, small, job(3))
    assert jobs.choose(2, IDLE) is old
    assert jobs.choose(3, IDLE) is small


def test_a_job_that_is_added_again_keeps_its_age():
    old, young = job(), job()
    jobs = ready(old, young, old)
    assert jobs.choose(2, IDLE) is old
