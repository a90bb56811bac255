"""Jobs and their queues: each ends exactly once, in time, and lets go of what it held."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from pdstore.async_runner import CPU, DevicePin
from pdstore.errors import DeviceError, Direction, QueueFull, Reason
from pdstore.metrics import Metrics
from pdstore.testing.values import exit_code_of, start_background
from pdstore.worker.job import Urgency
from pdstore.worker.job_queue import MAX_HUNG_CALLS, JobQueue
from tests.support.device_api import FakeApi
from tests.support.jobs import LOAD, SAVE, Gate, Shares, held, job_of
from tests.support.kv import eventually


@pytest.fixture
def make():
    made = []

    def make(workers=3, metrics=None, **limits) -> JobQueue:
        made.append(JobQueue(workers, DevicePin(CPU), metrics or Metrics(), **limits))
        return made[-1]

    yield make
    for queue in made:
        queue.close(0.0)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.requirement("R-AW-7", "the first error is kept, every wait ends, the worker goes on")
def test_a_bug_in_a_body_is_a_fault_and_the_worker_goes_on(make):
    queue = make()
    assert queue.submit(job_of(lambda child: 1 // 0)).wait(5).reason is Reason.FAULT
    assert queue.submit(job_of()).wait(5).reason is None


@pytest.mark.requirement("R-X-7, R17, R22", "every wait has a deadline")
def test_a_deadline_ends_the_job_and_not_its_call(make, gate):
    queue = make()
    job = queue.submit(held(gate, seconds=0.4))
    assert job.wait(5).reason is Reason.DEADLINE
    assert queue.num_hung == 1
    gate.open()
    eventually(lambda: queue.num_hung == 0)
    assert job.result.reason is Reason.DEADLINE


@pytest.fixture
def one_worker(make):
    """A queue whose two workers are held, one in each direction; then one of them does all.

    The result of `go` is awaited: it submits jobs and lets the worker of the loads do them.
    """
    queue, own = make(workers=3), Gate()
    gates = Gate(), Gate()
    for direction, gate in ((SAVE, gates[0]), (LOAD, gates[1]), (LOAD, own)):
        queue.submit(held(gate, direction))
        eventually(lambda gate=gate: gate.num_inside)

    def go(*jobs):
        for job in jobs:
            queue.submit(job)
        own.open()
        for job in jobs:
            assert job.wait(10).reason is None

    yield go
    for gate in (*gates, own):
        gate.open()


def noting(order, name, direction=SAVE, num_shares=0, **more):
    """A job that notes its name for each share, or once if it has none."""

    def note(child):
        order.append(name)

    work = Shares(*[note] * num_shares) if num_shares else Shares(last=note)
    return job_of(work, direction, **more)


def test_markers_overtake_hand_offs_and_those_all_others(one_worker):
    order = []
    one_worker(
        noting(order, "load", LOAD),
        noting(order, "save"),
        noting(order, "handoff", urgency=Urgency.HANDOFF),
        noting(order, "marker", urgency=Urgency.MARKER),
    )
    assert order == ["marker", "handoff", "load", "save"]


def test_a_small_job_passes_a_large_one_whose_time_is_up_later(make):
    queue, gate, order = make(workers=2), Gate(), []
    busy = queue.submit(held(gate, SAVE))
    eventually(lambda: gate.num_inside)
    sizes = [(4, 40.0), (3, 30.0), (1, 10.0)]
    jobs = [noting(order, n, num_shares=n, seconds=seconds) for n, seconds in sizes]
    for job in jobs:
        queue.submit(job)
    gate.open()
    for job in (busy, *jobs):
        assert job.wait(10).reason is None
    assert order == [1] + [3] * 3 + [4] * 4


@pytest.mark.parametrize("busy", list(Direction))
def test_one_direction_never_stops_the_other(make, gate, busy):
    queue = make(workers=3)
    for _ in range(8):
        queue.submit(held(gate, busy))
    other = SAVE if busy is LOAD else LOAD
    assert queue.submit(job_of(direction=other)).wait(5).reason is None


@pytest.mark.requirement(
    "R-AW-15",
    "queues are bounded in jobs and in bytes",
    note="dropping is the one policy, because a pool is a cache",
)
@pytest.mark.requirement("R-AR-10", "a refused job is not counted as accepted")
def test_a_full_queue_refuses_at_once_by_count_and_by_bytes(make):
    for changes, num_bytes in (({"max_jobs": 2}, 1), ({"max_bytes": 200}, 100)):
        queue, gate = make(workers=2, **changes), Gate()
        running = queue.submit(held(gate))
        eventually(lambda gate=gate: gate.num_inside)
        queued = [queue.submit(held(gate, num_bytes=num_bytes)) for _ in range(2)]
        refused = queue.submit(job_of(num_bytes=num_bytes))
        assert refused.result.reason is Reason.QUEUE_FULL
        assert not running.done
        assert not any(job.done for job in queued)
        gate.open()


def test_too_many_hung_calls_refuse_new_jobs_until_one_returns(make):
    gates = [Gate() for _ in range(MAX_HUNG_CALLS + 1)]
    queue = make(workers=6)
    for job in [queue.submit(held(g, seconds=0.4)) for g in gates]:
        job.wait(5)
    assert queue.submit(job_of()).result.reason is Reason.STORE_SLOW
    gates[0].open()
    eventually(lambda: queue.num_hung <= MAX_HUNG_CALLS)
    assert queue.submit(job_of()).wait(5).reason is None
    for g in gates:
        g.open()


def test_a_job_follows_those_it_is_after(make, gate):
    queue, order = make(), []

    def first_body(child):
        gate.pass_through(child)
        order.append(1)

    first = queue.submit(job_of(first_body))
    failed = queue.submit(job_of(lambda child: Reason.LOST))
    last = queue.submit(job_of(lambda child: order.append(2)), after=[first, failed])
    assert not last.done
    gate.open()
    assert last.wait(5).reason is None
    assert order == [1, 2]


@pytest.mark.requirement(
    "R-AW-16", "a close ends in bounded time, also when called twice, at exit or after a fork"
)
def test_close_is_bounded_and_every_job_fails_exactly_once(make, gate):
    queue, ends = make(workers=2), []
    jobs = [queue.submit(held(gate, d)) for d in Direction for _ in range(3)]
    for job in jobs:
        job.on_end(ends.append)
    start = time.monotonic()
    queue.close(0.05)
    assert time.monotonic() - start < 5
    assert [job.result.reason for job in jobs] == [Reason.CLOSED] * 6
    assert sorted(map(id, ends)) == sorted(map(id, jobs))
    assert queue.submit(job_of()).result.reason is Reason.CLOSED
    queue.close(0.05)


def test_a_watcher_that_fails_keeps_no_other_from_hearing_and_no_worker_from_working(make, caplog):
    queue, heard = make(workers=2), []
    for _ in range(3):
        job = job_of(lambda child: 1 // 0)
        job.on_end(lambda job: 1 // 0)
        job.on_end(heard.append)
        queue.submit(job).wait(5)
    eventually(lambda: len(heard) == 3)
    assert "failed" in caplog.text
    assert queue.submit(job_of()).wait(5).reason is None


def test_a_pin_that_fails_leaves_no_thread():
    class Gone(FakeApi):
        def set_device(self, index):
            self.failures.extend(["set"] * (len(self.calls) > 3))
            super().set_device(index)

    before = set(threading.enumerate())
    with pytest.raises(DeviceError):
        JobQueue(8, DevicePin(torch.device("cuda:1"), Gone()), Metrics())
    eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.requirement("R-DEV-3", "a pin that fails leaves no job counted as running")
def test_a_pin_that_fails_at_a_job_leaves_none_counted_as_running():
    api = FakeApi()
    queue = JobQueue(2, DevicePin(torch.device("cuda:1"), api), Metrics())
    api.failures.append("stream")
    assert queue.submit(job_of()).wait(5).reason is Reason.FAULT
    eventually(lambda: (queue.num_alive, queue.num_hung) == (0, 0))
    assert queue.submit(job_of()).wait(5).reason is None
    queue.close(1.0)


class HeldWhileCounted(Shares):
    """Work that is counted, under the queue's lock, only when the gate opens."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(lambda child: None)
        self.gate, self.is_held = gate, False

    def poll(self, *, takes: bool = False):
        self.is_held = True
        self.gate.wait()
        return super().poll(takes=takes)


def test_a_child_forked_while_a_thread_holds_the_locks_is_refused_at_once(make, gate):
    queue, work = make(workers=2), HeldWhileCounted(gate)
    job = job_of(work)
    join = start_background(lambda: queue.submit(job))
    eventually(lambda: work.is_held)

    def calls_everything() -> bool:
        job.cancel()
        queue.wake(job)
        refused = queue.submit(job_of()), queue.reject(job_of(), QueueFull("full"))
        assert queue.num_hung == 0
        assert not queue.close(1.0)
        return [each.result.reason for each in refused] == [Reason.CLOSED, Reason.QUEUE_FULL]

    assert exit_code_of(calls_everything) == 0
    assert not job.done
    gate.open()
    join(10)
    assert job.wait(10).reason is None


@pytest.mark.requirement("R-AW-13", "jobs submitted beside a close end exactly once")
def test_many_submitters_and_cancellers_end_every_job_once(make):
    queue, ends = make(workers=4), []

    def work(seed):
        for i in range(200):
            job = queue.submit(job_of(direction=LOAD if (seed + i) % 2 else SAVE))
            job.on_end(ends.append)
            if i % 3 == 0:
                job.cancel()

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    eventually(lambda: queue.num_alive == 0 and len(ends) >= 1200)
    assert len({id(j) for j in ends}) == len(ends) == 1200
