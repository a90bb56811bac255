"""SaveLedger: a flush ends when all saves are durable, or tells the first failure once."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from pdstore.errors import SaveFailed, StoreFull
from pdstore.outcome import Direction, JobResult, Reason
from pdstore.worker.job import Job
from pdstore.worker.save_ledger import SaveLedger
from tests.support.interrupt import acts_at_line

FULL = JobResult(64, Reason.STORE_FULL, StoreFull("no room"))


def a_save(ledger):
    job = Job(Direction.SAVE, lambda reason, error: None)
    ledger.add(job)
    return job


def test_a_flush_without_saves_returns_at_once():
    SaveLedger().flush(0.0)


def test_a_flush_waits_for_every_save_that_was_begun_before():
    ledger = SaveLedger()
    jobs = [a_save(ledger) for _ in range(3)]
    ended = threading.Event()

    def end():
        for job in jobs:
            job.settle(JobResult(64))
        ended.set()

    thread = threading.Timer(0.05, end)
    thread.start()
    ledger.flush(30)
    assert ended.wait(30)
    thread.join()


def test_a_flush_is_bounded():
    ledger = SaveLedger()
    job = a_save(ledger)
    with pytest.raises(TimeoutError, match=r"save still runs after 0\.01 s"):
        ledger.flush(0.01)
    job.settle(JobResult(64))
    ledger.flush(0.0)


@pytest.mark.parametrize("before", [True, False])
def test_the_first_failure_is_told_once_with_its_cause(before):
    ledger = SaveLedger()
    first, second, third = (a_save(ledger) for _ in range(3))
    first.settle(JobResult(128))
    second.settle(FULL)
    third.settle(JobResult(0, Reason.STORE_DOWN))
    if not before:
        a_save(ledger).settle(JobResult(64))
    with pytest.raises(SaveFailed, match="store_full; 64 leading") as caught:
        ledger.flush(30)
    assert isinstance(caught.value.__cause__, StoreFull)
    ledger.flush(0.0)


def test_of_two_flushes_at_once_one_is_told_of_a_failure():
    """Wherever the one is held up, the other comes meanwhile."""
    for number in count():
        ledger, told = SaveLedger(), []

        def flush(ledger=ledger, told=told):
            try:
                ledger.flush(0.0)
            except SaveFailed as error:
                told.append(error)

        a_save(ledger).settle(FULL)
        has_met = acts_at_line(flush, number, flush)
        assert len(told) == 1
        if not has_met:
            break
    assert number > 5


def test_a_cancelled_save_is_no_failure():
    ledger = SaveLedger()
    a_save(ledger).settle(JobResult(0, Reason.CANCELLED))
    ledger.flush(0.0)


def test_ended_saves_are_forgotten_without_a_flush():
    ledger = SaveLedger()
    job = a_save(ledger)
    job.settle(JobResult(64))
    a_save(ledger)
    with pytest.raises(TimeoutError):
        ledger.flush(0.0)
