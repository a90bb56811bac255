"""Job: it ends once, whoever waits hears of it, and nothing touches the paged cache after it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pdstore.errors import JobError, JobResult, Reason, StoreUnavailable
from pdstore.testing.values import start_background
from pdstore.worker.job import NoShare
from tests.support.jobs import Shares, carry, job_of


def test_waiting_for_a_job_is_bounded():
    with pytest.raises(TimeoutError):
        job_of().wait(0.01)


@pytest.mark.requirement("R-AR-13", "several threads may wait for the end of a job")
def test_all_who_wait_hear_of_the_end():
    job, heard = job_of(), []
    join = start_background(*[lambda: heard.append(job.wait(10))] * 4)
    job.end_with(Reason.LOST)
    join(10)
    assert heard == [JobResult(0, Reason.LOST)] * 4


def test_a_watcher_is_called_once_and_finds_the_job_done():
    job, heard = job_of(), []
    job.on_end(lambda job: heard.append(job.result))
    job.end_with(None)
    job.on_end(lambda job: heard.append(job.result))
    assert heard == [JobResult(0)] * 2


def test_a_poll_gives_a_share_or_says_why_there_is_none():
    work = Shares(*[lambda child: None] * 5, at_once=2)
    with work.lock:
        assert [work.poll().num_ready for _ in range(2)] == [3, 3]
        assert [work.poll(takes=True).num_ready for _ in range(3)] == [3, 2, 1]
        assert work.poll() is NoShare.DONE
        assert Shares(is_closed=False).poll() is NoShare.NOT_YET


def test_a_job_wants_a_worker_for_each_share_and_then_one_that_ends_it():
    job = job_of(Shares(lambda child: None))
    turn, second = job.begin_turn(), job.begin_turn()
    assert turn.do_share()
    assert not second.do_share()
    assert job.begin_turn() is None  # two are at the job already, and no share is left
    with turn:
        pass
    assert not job.done
    with second:
        pass
    assert job.result == JobResult(0)


def test_a_job_whose_work_goes_on_wants_no_worker_now():
    job = job_of(Shares(is_closed=False))
    assert job.peek() is NoShare.NOT_YET
    assert job.begin_turn() is None
    job.end_with(None)
    assert job.peek() is NoShare.DONE


def test_after_a_shortfall_no_share_begins():
    done: list = []
    job = job_of(Shares(lambda child: Reason.LOST, done.append))
    carry(job)
    assert (job.result.reason, done) == (Reason.LOST, [])


def test_a_block_copy_is_never_cut_short():
    inside: list = []

    def body(child):
        with child.copying():
            job.cancel()
            inside.append(job.done)
        child.raise_if_over()

    job = job_of(body)
    carry(job)
    assert inside == [False]
    assert job.result.reason is Reason.CANCELLED


def test_an_end_waits_for_the_last_of_several_copies():
    job = job_of(Shares(lambda child: None, lambda child: None))
    first, second = job.begin_turn(), job.begin_turn()
    with first.copying():
        with second.copying():
            job.cancel()
        assert not job.done
    assert job.done


def test_nothing_touches_the_cache_after_the_end():
    job = job_of()
    child = job.begin_turn()
    job.cancel()
    with pytest.raises(JobError), child.copying():
        pytest.fail("a copy began")
    with pytest.raises(JobError), child.in_store_call():
        pytest.fail("a store call began")


def test_an_end_and_a_copy_that_begin_at_once_never_overlap():
    for _ in range(300):
        job = job_of(Shares(lambda child: None))
        child, start, seen = job.begin_turn(), threading.Barrier(2), []

        def copy(job=job, child=child, start=start, seen=seen):
            start.wait(10)
            try:
                with child.copying():
                    seen.append(job.done)
                    seen.append(job.done)
            except JobError:
                pass

        def cancel(job=job, start=start):
            start.wait(10)
            job.cancel()

        start_background(copy, cancel)(10)
        assert True not in seen
        assert job.done


def test_a_copy_under_way_is_waited_for_when_the_next_share_fails():
    order: list = []
    job = job_of(
        Shares(lambda child: child.finish_copy(lambda: order.append("copied")), lambda c: 1 // 0)
    )
    carry(job)
    assert order == ["copied"]


@pytest.mark.requirement("R-AW-14", "what a job held is free when it is done")
def test_what_a_job_holds_is_released_before_it_is_done():
    class Tensor:
        pass

    tensor = Tensor()
    gone = weakref.ref(tensor)
    seen: list = []
    job = job_of(lambda child, tensor=tensor: None)
    job.on_end(lambda job: seen.append(gone()))
    del tensor
    carry(job)
    assert seen == [None]


def test_an_error_in_a_result_holds_no_frames():
    """A traceback's frames hold the slots and tensors of whoever raised; causes have some too."""

    class Slot:
        pass

    gone: list = []

    def fails(child):
        slot = Slot()
        gone.append(weakref.ref(slot))
        try:
            raise OSError("inner")
        except OSError as error:
            raise StoreUnavailable("outer") from error

    job = job_of(Shares(fails))
    carry(job)
    gc.collect()
    assert job.result.error.__cause__ is not None
    assert gone[0]() is None


@pytest.fixture
def job():
    return job_of()


@pytest.fixture
def child(job):
    return job.begin_turn()
