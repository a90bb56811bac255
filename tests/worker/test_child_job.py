"""ChildJob: the end of its job stops what it begins; one copy at most is under way."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import JobError
from pdstore.outcome import Reason
from pdstore.worker.child_job import ChildJob
from pdstore.worker.job_run import JobRun
from tests.support.jobs import run_of


@pytest.fixture
def run() -> JobRun:
    return run_of()


@pytest.fixture
def child(run) -> ChildJob:
    child = run.take(lambda run: False)
    assert child is not None
    return child


def test_no_store_call_begins_after_the_end(run, child):
    run.end(Reason.CANCELLED)
    calls = []
    with pytest.raises(JobError), child.in_store_call():
        calls.append("inside")
    assert not calls
    assert not child.is_in_store_call


def test_an_answer_that_comes_after_the_end_is_not_used(run, child):
    with pytest.raises(JobError), child.in_store_call():
        run.end(Reason.CANCELLED)
    assert not child.is_in_store_call


def test_a_store_call_shows_while_it_runs(child):
    with child.in_store_call():
        assert child.is_in_store_call
    assert not child.is_in_store_call


def test_a_store_call_that_fails_is_over(child):
    with contextlib.suppress(OSError), child.in_store_call():
        raise OSError
    assert not child.is_in_store_call


@pytest.mark.parametrize(
    ("seconds", "ends", "hangs"),
    [(0.0, True, True), (0.0, False, False), (30.0, True, False)],
)
def test_a_call_hangs_when_its_job_has_ended_because_the_time_is_up(seconds, ends, hangs):
    run = run_of(seconds=seconds)
    child = run.take(lambda run: False)
    with contextlib.suppress(JobError), child.in_store_call():
        if ends:
            run.end(Reason.DEADLINE)
        assert child.is_hung is hangs
    assert not child.is_hung


def test_no_copy_begins_after_the_end(run, child):
    run.end(Reason.CANCELLED)
    with pytest.raises(JobError), child.copying():
        pytest.fail("the paged cache was touched")


def test_an_end_during_a_copy_comes_when_the_copy_is_over(run, child):
    with child.copying():
        run.end(Reason.CANCELLED)
        assert child.is_over
        assert not run.job.done
    assert run.job.done


def test_a_copy_that_fails_lets_the_job_end(run, child):
    with contextlib.suppress(OSError), child.copying():
        run.end(Reason.CANCELLED)
        raise OSError
    assert run.job.done


def test_a_copy_is_waited_for_when_the_next_one_follows_and_at_the_end(child):
    waited = []
    child.follow(lambda: waited.append(1))
    assert (child.has_copy_under_way, waited) == (True, [])
    child.follow(lambda: waited.append(2))
    assert (child.has_copy_under_way, waited) == (True, [1])
    child.finish_copy()
    child.finish_copy()
    assert (child.has_copy_under_way, waited) == (False, [1, 2])


def test_a_copy_that_fails_is_not_waited_for_twice(child):
    def fails() -> None:
        raise OSError

    child.follow(fails)
    with pytest.raises(OSError):
        child.follow(lambda: None)
    child.finish_copy()
    assert not child.has_copy_under_way


def test_captured_is_what_the_owner_sees(run, child):
    assert not run.job.captured
    child.set_captured()
    assert run.job.captured
    assert not run.job.done
