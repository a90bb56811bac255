"""JobRun: shares, their end, and how the end of a job and its block copies exclude each other."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pdstore.errors import JobError, StoreFull, StoreUnavailable
from pdstore.outcome import JobResult, Reason
from pdstore.testing.threads import start_background
from pdstore.threads import Worker
from tests.support.jobs import Shares, run_of


def carry(run, goes_on=lambda run: True) -> None:
    """Does what a worker does with a job: takes a child job and runs it."""
    children = [run.take(goes_on)]
    worker = Worker("carrier", lambda: children.pop() if children else None)
    assert worker.join(10)


def test_a_worker_carries_all_shares_then_the_end():
    done: list = []
    work = Shares(
        *[lambda child, i=i: done.append(i) for i in range(3)], last=lambda c: done.append("end")
    )
    run = run_of(work)
    carry(run)
    assert done == [0, 1, 2, "end"]
    assert run.job.result == JobResult(0)


def test_a_worker_leaves_when_it_is_another_jobs_turn_and_the_job_stays_open():
    done: list = []
    work = Shares(*[lambda child, i=i: done.append(i) for i in range(2)])
    run = run_of(work)
    carry(run, lambda run: False)
    assert done == [0]
    assert not run.job.done
    assert run.has_more
    carry(run, lambda run: False)
    assert done == [0, 1]
    assert run.job.result == JobResult(0)


def test_the_last_of_several_workers_does_the_end():
    first_inside, go_on, ends = threading.Event(), threading.Event(), []

    def slow(child):
        first_inside.set()
        assert go_on.wait(10)

    run = run_of(Shares(slow, lambda child: None, last=lambda child: ends.append(1)))
    join = start_background(lambda: carry(run))
    assert first_inside.wait(10)
    carry(run)
    assert not run.has_more
    assert ends == []
    go_on.set()
    join(10)
    assert ends == [1]
    assert run.job.done


def test_many_workers_do_each_share_and_the_end_once():
    for _ in range(50):
        done: list = []
        work = Shares(*[done.append] * 7, last=lambda child, done=done: done.append("end"))
        run = run_of(work)
        start = threading.Barrier(4)

        def worker(run=run, start=start):
            start.wait(10)
            while run.has_more:
                child = run.take(lambda run: True)
                if child is not None:
                    child.run()

        start_background(*[worker] * 4)(10)
        assert run.job.done
        assert len(done) == 8
        assert done[-1] == "end"


def test_behind_a_shortfall_no_share_is_begun_and_the_end_is_told_of_it():
    done: list = []
    run = run_of(Shares(lambda child: Reason.LOST, done.append))
    carry(run)
    assert done == []
    assert run.job.result == JobResult(0, Reason.LOST)


def test_an_error_of_the_store_is_a_shortfall_and_kept():
    def fails(child):
        raise StoreFull("no room")

    ended: list = []
    run = run_of(Shares(fails, last=lambda child: ended.append(1)))
    carry(run)
    assert ended == [1]
    assert run.job.result.reason is Reason.STORE_FULL
    assert isinstance(run.job.result.error, StoreFull)


def test_a_bug_ends_the_job_at_once_as_a_fault():
    ended: list = []
    run = run_of(Shares(lambda child: 1 // 0, last=lambda child: ended.append(1)))
    carry(run)
    assert ended == []
    assert run.job.result.reason is Reason.FAULT


def test_no_other_worker_finishes_a_job_whose_fault_is_not_told_yet():
    """Between the exception and `fail` all shares are taken and nobody seems to be at work."""
    run = run_of(Shares(lambda child: 1 // 0))
    child = run.take(lambda run: True)
    with pytest.raises(ZeroDivisionError):
        child.run()
    assert not run.has_more
    child.fail(ZeroDivisionError())
    assert run.job.result.reason is Reason.FAULT


def test_open_work_waits_for_more_shares():
    work = Shares(lambda child: None)
    work.is_closed = False
    run = run_of(work)
    carry(run)
    assert not run.job.done
    assert not run.has_more
    work.is_closed = True
    assert run.has_more
    carry(run)
    assert run.job.done


def test_a_block_copy_is_never_cut_short():
    inside: list = []

    def body(child):
        with child.copying():
            run.job.cancel()
            inside.append(run.job.done)
        child.check()

    run = run_of(body)
    carry(run)
    assert inside == [False]
    assert run.job.result.reason is Reason.CANCELLED


def test_an_end_waits_for_the_last_of_several_copies():
    run = run_of(Shares(lambda child: None, lambda child: None))
    first, second = run.take(lambda run: True), run.take(lambda run: True)
    first.begin_copy()
    second.begin_copy()
    run.job.cancel()
    first.end_copy()
    assert not run.job.done
    second.end_copy()
    assert run.job.done


def test_nothing_touches_the_cache_after_the_end():
    run = run_of()
    child = run.take(lambda run: True)
    run.job.cancel()
    with pytest.raises(JobError), child.copying():
        pytest.fail("a copy began")
    with pytest.raises(JobError), child.in_store_call():
        pytest.fail("a store call began")


def test_an_end_and_a_copy_that_begin_at_once_never_overlap():
    for _ in range(300):
        run = run_of(Shares(lambda child: None))
        child, start, seen = run.take(lambda run: True), threading.Barrier(2), []

        def copy(run=run, child=child, start=start, seen=seen):
            start.wait(10)
            try:
                with child.copying():
                    seen.append(run.job.done)
                    seen.append(run.job.done)
            except JobError:
                pass

        def cancel(run=run, start=start):
            start.wait(10)
            run.job.cancel()

        start_background(copy, cancel)(10)
        assert True not in seen
        assert run.job.done


def test_a_copy_under_way_is_waited_for_before_the_child_job_leaves():
    order: list = []

    def share(name):
        def body(child):
            order.append(f"fill {name}")
            child.follow(lambda: order.append(f"copied {name}"))

        return body

    run = run_of(Shares(share("a"), share("b"), last=lambda child: order.append("end")))
    carry(run)
    assert order == ["fill a", "fill b", "copied a", "copied b", "end"]


def test_a_copy_under_way_is_waited_for_when_the_next_share_fails():
    order: list = []
    run = run_of(
        Shares(lambda child: child.follow(lambda: order.append("copied")), lambda c: 1 // 0)
    )
    carry(run)
    assert order == ["copied"]


def test_what_a_job_holds_is_released_before_it_is_done():
    class Tensor:
        pass

    tensor = Tensor()
    gone = weakref.ref(tensor)
    seen: list = []
    run = run_of(lambda child, tensor=tensor: None)
    run.job.on_end(lambda job: seen.append(gone()))
    del tensor
    carry(run)
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

    run = run_of(Shares(fails))
    carry(run)
    gc.collect()
    assert run.job.result.error.__cause__ is not None
    assert gone[0]() is None


def test_the_end_of_a_job_counts_the_progress_of_then():
    work = Shares(lambda child: setattr(work, "tokens", 64) or run.job.cancel())
    run = run_of(work)
    carry(run)
    assert run.job.result.num_tokens == 64
    assert run.job.result.reason is Reason.CANCELLED
