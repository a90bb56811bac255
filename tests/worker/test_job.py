"""Job: it ends once, and whoever waits or watches hears of it."""

from __future__ import annotations

import os
import threading

import pytest

from pdstore.outcome import Direction, JobResult, Reason
from pdstore.testing.threads import start_background
from pdstore.worker.job import Job


def job_of(ends: list | None = None) -> Job:
    return Job(Direction.LOAD, lambda *end: None if ends is None else ends.append(end))


def test_only_the_first_result_counts():
    job = job_of()
    job.settle(JobResult(1))
    job.settle(JobResult(2))
    assert job.result == JobResult(1)


def test_its_time_in_the_store_is_from_the_first_begin_to_the_last_end():
    job = job_of()
    assert job.in_store is None
    for begin, end in ((2.0, 3.0), (1.0, 4.0), (2.5, 3.5)):  # of workers that call at once
        job.note_store_call(begin, end)
    assert job.in_store == (1.0, 4.0)


def test_waiting_for_a_job_is_bounded():
    with pytest.raises(TimeoutError):
        job_of().wait(0.01)


def test_all_who_wait_hear_of_the_end():
    job, heard = job_of(), []
    join = start_background(*[lambda: heard.append(job.wait(10))] * 4)
    job.settle(JobResult(5))
    join(10)
    assert heard == [JobResult(5)] * 4


def test_a_watcher_is_called_once_and_finds_the_job_done():
    job, heard = job_of(), []
    job.on_end(lambda job: heard.append(job.result))
    job.settle(JobResult(3))
    job.on_end(lambda job: heard.append(job.result))
    assert heard == [JobResult(3)] * 2


def test_a_watcher_that_fails_keeps_no_other_from_hearing(caplog):
    job, heard = job_of(), []
    job.on_end(lambda job: 1 // 0)
    job.on_end(heard.append)
    job.settle(JobResult(0))
    assert heard == [job]
    assert "failed" in caplog.text


def test_watchers_that_come_while_the_job_ends_are_called_once_each():
    for _ in range(200):
        job, heard = job_of(), []
        start = threading.Barrier(2)

        def watch(job=job, heard=heard, start=start):
            start.wait(10)
            for i in range(5):
                job.on_end(lambda _, i=i: heard.append(i))

        def settle(job=job, start=start):
            start.wait(10)
            job.settle(JobResult(0))

        start_background(watch, settle)(10)
        assert sorted(heard) == [0, 1, 2, 3, 4]


def test_a_save_is_captured_when_it_says_so_or_when_it_has_ended():
    said, ended = job_of(), job_of()
    assert not said.captured
    said.set_captured()
    ended.settle(JobResult(0, Reason.CANCELLED))
    assert said.captured
    assert ended.captured


@pytest.mark.parametrize(("reason", "durable"), [(None, True), (Reason.LOST, False)])
def test_a_save_is_durable_when_nothing_is_missing(reason, durable):
    job = job_of()
    assert not job.durable
    job.settle(JobResult(0, reason))
    assert job.durable is durable


def test_cancel_ends_the_work_with_a_reason():
    ends: list = []
    job_of(ends).cancel()
    assert ends[0][0] is Reason.CANCELLED


def test_a_forked_child_cancels_nothing():
    ends: list = []
    job = job_of(ends)
    pid = os.fork()
    if pid == 0:
        job.cancel()
        os._exit(len(ends))
    assert os.waitpid(pid, 0)[1] == 0
