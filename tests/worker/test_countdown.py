"""Countdown: the function is called once, after the last job and not before."""

from __future__ import annotations

import pytest

from pdstore.testing.threads import run_together
from pdstore.worker.countdown import Countdown
from tests.support.jobs import run_of


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_function_is_called_after_the_last_job(n):
    calls: list[int] = []
    num_counted = 0
    countdown = Countdown(n, lambda: calls.append(num_counted))
    for _ in range(n):
        num_counted += 1
        countdown.count(run_of().job)
    assert calls == [n]


def test_jobs_that_end_at_once_on_many_threads_call_it_once():
    calls: list[None] = []
    countdown, job = Countdown(800, lambda: calls.append(None)), run_of().job

    def count():
        for _ in range(100):
            countdown.count(job)

    run_together(*[count] * 8)
    assert len(calls) == 1
