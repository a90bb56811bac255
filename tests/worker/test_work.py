"""Work: without shares all is in `finish`, which one worker calls once."""

from __future__ import annotations

import pytest

from pdstore.outcome import JobResult, Reason
from pdstore.worker.work import Shortfall, Work
from tests.support.jobs import run_of


def carry(run) -> None:
    child = run.take(lambda run: False)
    assert run.take(lambda run: False) is None  # there is nothing for a second worker
    run.carry(child, lambda run: False)


def test_work_without_shares_ends_complete_on_one_worker():
    run = run_of(Work())
    carry(run)
    assert run.job.result == JobResult(0)


def test_work_without_shares_keeps_the_reason_it_was_given():
    run = run_of(Work())
    run.fall_short(Reason.LOST)
    carry(run)
    assert run.job.result.reason is Reason.LOST


def test_the_last_word_is_that_of_finish():
    class Mended(Work):
        def finish(self, child, shortfall):
            assert shortfall == Shortfall(Reason.LOST)

    run = run_of(Mended())
    run.fall_short(Reason.LOST)
    carry(run)
    assert run.job.result == JobResult(0)


def test_there_is_no_share_to_take():
    with pytest.raises(NotImplementedError):
        Work().take()
