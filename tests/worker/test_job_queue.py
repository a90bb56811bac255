"""Jobs and their queues: each ends exactly once, in time, and lets go of what it held."""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
import torch

from pdstore.errors import DeviceError, JobError, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.outcome import Direction, JobResult, Reason
from pdstore.threads import CPU, DevicePin
from pdstore.worker.job import Job
from pdstore.worker.job_queue import MAX_HUNG_CALLS, JobQueue
from tests.support.kv import eventually, settings_of

LOAD, SAVE = Direction.LOAD, Direction.SAVE


@pytest.fixture
def make():
    made = []

    def make(**changes) -> JobQueue:
        settings = settings_of(**{"workers": 3, "drain_s": 0.0, **changes})
        made.append(JobQueue(settings, DevicePin(CPU), Metrics()))
        return made[-1]

    yield make
    for transfer in made:
        transfer.close(0.0)


def job_of(body=lambda job: None, direction=LOAD, seconds=30.0, num_bytes=1) -> Job:
    return Job(direction, body, num_bytes=num_bytes, seconds=seconds)


def held(gate: threading.Event, direction=LOAD, seconds=30.0, num_bytes=1) -> Job:
    """A job that stays inside its store call until the gate opens."""

    def body(job):
        with job.in_store_call():
            gate.wait(30)

    return job_of(body, direction, seconds, num_bytes)


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_job_ends_with_what_its_body_did(make):
    def body(job):
        job.progress = 7

    assert make().submit(job_of(body)).wait(5) == JobResult(7)


def test_a_reason_is_no_error(make):
    result = make().submit(job_of(lambda job: Reason.CORRUPT)).wait(5)
    assert (result.reason, result.error) == (Reason.CORRUPT, None)


def test_an_exception_is_a_reason_and_kept(make):
    def body(job):
        job.progress = 64
        raise StoreUnavailable("gone")

    result = make().submit(job_of(body)).wait(5)
    assert (result.num_tokens, result.reason) == (64, Reason.STORE_DOWN)
    assert isinstance(result.error, StoreUnavailable)


def test_a_bug_in_a_body_is_a_fault_and_the_worker_goes_on(make):
    transfer = make()
    assert transfer.submit(job_of(lambda job: 1 // 0)).wait(5).reason is Reason.FAULT
    assert transfer.submit(job_of()).wait(5).reason is None


def test_waiting_for_a_job_is_bounded(make, gate):
    job = make().submit(held(gate))
    with pytest.raises(TimeoutError):
        job.wait(0.01)


def test_what_a_job_captured_is_released_before_it_is_done(make):
    class Tensor:
        pass

    transfer = make()
    for _ in range(50):
        tensor = Tensor()
        gone = weakref.ref(tensor)
        job = transfer.submit(job_of(lambda job, tensor=tensor: None))
        del tensor
        job.wait(5)
        assert gone() is None


def test_who_asks_before_the_end_is_announced_finds_the_job_done():
    results = []

    class AskedJustThen(Job):
        def _announce(self):
            self.on_end(lambda job: results.append(job.result))
            super()._announce()

    AskedJustThen(Direction.SAVE, lambda job: None, num_bytes=0, seconds=1).end(None)
    assert results == [JobResult(0)]


def test_a_deadline_ends_the_job_and_not_its_call(make, gate):
    transfer = make()
    job = transfer.submit(held(gate, seconds=0.02))
    assert job.wait(5).reason is Reason.DEADLINE
    assert job.is_hung
    assert transfer.num_hung == 1
    gate.set()
    eventually(lambda: transfer.num_hung == 0)
    assert job.result.reason is Reason.DEADLINE


def test_a_queued_job_ends_at_its_deadline_too(make, gate):
    transfer = make(workers=2)
    transfer.submit(held(gate, SAVE))
    waiting = transfer.submit(job_of(direction=SAVE, seconds=0.02))
    assert waiting.wait(5).reason is Reason.DEADLINE
    assert not waiting.is_hung


def test_a_block_copy_is_never_cut_short(make):
    inside, go_on, ended_inside = threading.Event(), threading.Event(), []

    def body(job):
        with job.copying():
            inside.set()
            go_on.wait(30)
            ended_inside.append(job.done)
        job.check()

    job = make().submit(job_of(body))
    assert inside.wait(5)
    job.cancel()
    assert not job.done
    go_on.set()
    assert job.wait(5).reason is Reason.CANCELLED
    assert ended_inside == [False]


def test_nothing_touches_the_cache_after_the_end(make, gate):
    touched, started, tried = [], threading.Event(), threading.Event()

    def body(job):
        started.set()
        gate.wait(30)
        try:
            with job.copying():
                touched.append(1)
        finally:
            tried.set()

    job = make().submit(job_of(body))
    assert started.wait(5)
    job.cancel()
    gate.set()
    assert tried.wait(5)
    assert touched == []
    with pytest.raises(JobError):
        job.check()


def test_loads_go_first(make, gate):
    transfer, names = make(workers=3), {}
    own = threading.Event()  # ends the job on the worker that serves both directions

    def hold(job):
        names[job] = threading.current_thread().name
        (own if names[job].endswith("-2") else gate).wait(30)

    for direction, count in ((LOAD, 2), (SAVE, 3)):
        for _ in range(count - (direction is SAVE) * 2):
            transfer.submit(job_of(hold, direction))
        eventually(lambda count=count: len(names) == count)
    order = []
    jobs = [transfer.submit(job_of(lambda job, d=d: order.append(d), d)) for d in (SAVE, LOAD) * 3]
    own.set()
    for job in jobs:
        job.wait(5)
    assert order == [LOAD] * 3 + [SAVE] * 3


@pytest.mark.parametrize("busy", list(Direction))
def test_one_direction_never_stops_the_other(make, gate, busy):
    transfer = make(workers=3)
    for _ in range(8):
        transfer.submit(held(gate, busy))
    other = SAVE if busy is LOAD else LOAD
    assert transfer.submit(job_of(direction=other)).wait(5).reason is None


def test_a_full_queue_refuses_at_once_by_count_and_by_bytes(make, gate):
    for changes, num_bytes in (({"queue_jobs": 2}, 1), ({"queue_bytes": 200}, 100)):
        transfer = make(workers=2, **changes)
        running = transfer.submit(held(gate))
        eventually(lambda t=transfer: not any(t._queues.values()))
        queued = [transfer.submit(held(gate, num_bytes=num_bytes)) for _ in range(2)]
        refused = transfer.submit(job_of(num_bytes=num_bytes))
        assert refused.result.reason is Reason.QUEUE_FULL
        assert not running.done
        assert not any(job.done for job in queued)


def test_a_job_larger_than_the_bound_runs_when_it_is_alone(make):
    assert make(queue_bytes=10).submit(job_of(num_bytes=1000)).wait(5).reason is None


def test_too_many_hung_calls_refuse_new_jobs_until_one_returns(make):
    gates = [threading.Event() for _ in range(MAX_HUNG_CALLS + 1)]
    transfer = make(workers=6)
    for job in [transfer.submit(held(g, seconds=0.02)) for g in gates]:
        job.wait(5)
    assert transfer.submit(job_of()).result.reason is Reason.STORE_SLOW
    gates[0].set()
    eventually(lambda: transfer.num_hung <= MAX_HUNG_CALLS)
    assert transfer.submit(job_of()).wait(5).reason is None
    for g in gates:
        g.set()


def test_a_job_follows_those_it_is_after(make, gate):
    transfer, order = make(), []

    def first_body(job):
        gate.wait(30)
        order.append(1)

    first = transfer.submit(job_of(first_body))
    failed = transfer.submit(job_of(lambda job: Reason.LOST))
    last = transfer.submit(job_of(lambda job: order.append(2)), after=[first, failed])
    assert not last.done
    gate.set()
    assert last.wait(5).reason is None
    assert order == [1, 2]


def test_the_clock_of_a_job_that_waits_for_others_starts_when_it_may_run(make, gate):
    transfer = make()
    first = transfer.submit(held(gate))
    last = transfer.submit(job_of(seconds=0.05), after=[first])
    with pytest.raises(TimeoutError):
        last.wait(0.2)
    gate.set()
    assert last.wait(5).reason is None


def test_close_lets_running_jobs_end(make, gate):
    transfer = make()
    job = transfer.submit(held(gate))
    threading.Timer(0.05, gate.set).start()
    transfer.close(10)
    assert job.result == JobResult(0)


def test_close_is_bounded_and_every_job_fails_exactly_once(make, gate):
    transfer, ends = make(workers=2), []
    jobs = [transfer.submit(held(gate, d)) for d in Direction for _ in range(3)]
    for job in jobs:
        job.on_end(ends.append)
    start = time.monotonic()
    transfer.close(0.05)
    assert time.monotonic() - start < 5
    assert [job.result.reason for job in jobs] == [Reason.CLOSED] * 6
    assert sorted(map(id, ends)) == sorted(map(id, jobs))
    assert transfer.submit(job_of()).result.reason is Reason.CLOSED
    transfer.close(0.05)


def test_no_thread_is_left_after_close(make):
    before = set(threading.enumerate())
    transfer = make()
    transfer.submit(job_of()).wait(5)
    transfer.close(1.0)
    assert set(threading.enumerate()) <= before


def test_cancelled_jobs_in_a_store_call_do_not_count_as_hung(make, gate):
    transfer = make(workers=6)
    jobs = [transfer.submit(held(gate)) for _ in range(MAX_HUNG_CALLS + 2)]
    eventually(lambda: all(job.is_in_store for job in jobs))
    for job in jobs:
        job.cancel()
    assert transfer.num_hung == 0
    assert transfer.submit(job_of()).wait(5).reason is None


def test_jobs_that_wait_for_others_count_in_the_bounds(make, gate):
    transfer = make(queue_jobs=3)
    first = transfer.submit(held(gate))
    jobs = [transfer.submit(job_of(), after=[first]) for _ in range(10)]
    refused = [job for job in jobs if job.done]
    assert len(refused) >= 7
    assert {job.result.reason for job in refused} == {Reason.QUEUE_FULL}


def test_a_watcher_that_fails_keeps_no_other_from_hearing_and_no_worker_from_working(make, caplog):
    transfer, heard = make(workers=2), []
    for _ in range(3):
        job = job_of(lambda job: 1 // 0)
        job.on_end(lambda job: 1 // 0)
        job.on_end(heard.append)
        transfer.submit(job)
        job.wait(5)
    eventually(lambda: len(heard) == 3)
    assert "failed" in caplog.text
    assert transfer.submit(job_of()).wait(5).reason is None


def test_a_pin_that_fails_leaves_no_thread(make):
    class Api:
        num_calls = 0

        def current_device(self):
            Api.num_calls += 1
            if Api.num_calls > 6:
                raise RuntimeError("no device")
            return 1

        def set_device(self, index):
            pass

        def reset_stream(self, index):
            pass

    before = set(threading.enumerate())
    pin = DevicePin(torch.device("cuda:1"), Api())
    with pytest.raises(DeviceError):
        JobQueue(settings_of(workers=8), pin, Metrics())
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_forked_child_is_refused(make):
    transfer = make()
    read, write = os.pipe()
    with transfer._changed:  # as another thread may at the time of the fork
        pid = os.fork()
    if pid == 0:
        result = transfer.submit(job_of()).result
        os.write(write, result.reason.value.encode() if result else b"none")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"closed"


def test_many_submitters_and_cancellers_end_every_job_once(make):
    transfer, ends = make(workers=4), []

    def work(seed):
        for i in range(200):
            job = transfer.submit(job_of(direction=LOAD if (seed + i) % 2 else SAVE))
            job.on_end(ends.append)
            if i % 3 == 0:
                job.cancel()

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    eventually(lambda: transfer.num_alive == 0)
    assert len({id(j) for j in ends}) == len(ends) == 1200
