"""EndedJobs: each end is counted once, and none by the main thread, which runs signal handlers."""

from __future__ import annotations

import pytest

from pdstore.metrics import Metrics
from pdstore.outcome import Direction, Reason
from pdstore.testing.threads import run_together
from pdstore.worker.ended_jobs import EndedJobs
from tests.support.jobs import LOAD, SAVE, run_of


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def ended(direction: Direction = LOAD, reason: Reason | None = None):
    run = run_of(direction=direction)
    run.end(reason)
    return run


def num_ends(metrics: Metrics, direction: str, outcome: str) -> float:
    labels = {"direction": direction, "outcome": outcome}
    return metrics.registry.get_sample_value("pdstore_jobs_total", labels) or 0.0


def test_an_end_on_the_main_thread_is_left_to_another_one(metrics):
    woken: list[None] = []
    jobs = EndedJobs(metrics, lambda: woken.append(None))
    jobs.add(ended())
    assert (len(woken), num_ends(metrics, "load", "ok")) == (1, 0)
    run_together(jobs.count)
    assert num_ends(metrics, "load", "ok") == 1


def test_an_end_on_another_thread_is_counted_there_with_all_before_it(metrics):
    jobs = EndedJobs(metrics, lambda: None)
    jobs.add(ended(SAVE, Reason.DEADLINE))
    run_together(lambda: jobs.add(ended(LOAD)))
    assert num_ends(metrics, "save", "deadline") == num_ends(metrics, "load", "ok") == 1


def test_threads_that_count_at_once_count_every_end_once(metrics):
    jobs = EndedJobs(metrics, lambda: None)
    for _ in range(500):
        jobs.add(ended())
    run_together(*[jobs.count] * 4)
    assert num_ends(metrics, "load", "ok") == 500
