"""The queues and threads that run jobs.

Locking. The condition guards queues, counts and the heap of deadlines. No job is run, ended or
asked for its lock under it, and no I/O is done under it. A job's own lock is a leaf.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pdstore.errors import (
    JobDeadline,
    JobError,
    PoolClosed,
    QueueFull,
    StoreError,
    StoreTimeout,
)
from pdstore.metrics import Metrics
from pdstore.outcome import Direction, Reason
from pdstore.settings import Settings
from pdstore.threads import Deadline, DevicePin, Ticker, Worker
from pdstore.worker.job import Job

log = logging.getLogger(__name__)

MAX_HUNG_CALLS = 2
_JOIN_S = 1.0


class JobQueue:
    """Runs jobs: loads first, a worker kept for each direction, bounds on queues, time and close.

    A deadline ends the job; its worker stays out of service until the store call has really
    returned. While more than MAX_HUNG_CALLS such calls are out, new jobs are refused at once.

    Raises DeviceError when a worker cannot be put on its device.
    """

    def __init__(self, settings: Settings, pin: DevicePin, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[Job]] = {d: deque() for d in Direction}
        self._waiting: dict[Job, int] = {}  # accepted and not yet taken, with their bytes
        self._alive: set[Job] = set()
        self._in_store: set[Job] = set()  # ended, and their worker is still in a store call
        self._deadlines: list[tuple[float, int, Job]] = []
        self._num_queued = 0
        self._closed = False
        self._pid = os.getpid()
        metrics.hung_calls.set_function(lambda: self.num_hung)
        metrics.jobs_alive.set_function(lambda: self.num_alive)
        self._workers: list[Worker] = []
        self._clock = Ticker("pdstore-deadlines", self._end_late_jobs)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, 0.0)
            for i in range(settings.workers):
                take = partial(self._take, _directions_of(i))
                self._workers.append(Worker(f"pdstore-worker-{i}", take, pin))
            undo.pop_all()

    def submit(self, job: Job, after: Sequence[Job] = ()) -> Job:
        """Queues a job, behind those in `after`. A refused one comes back ended, with a reason."""
        if os.getpid() != self._pid:  # a lock may have been held when the process forked
            job.fail(PoolClosed("the pool belongs to the parent process: open one after the fork"))
            return job
        refusal = self._refuse(job)
        if refusal is not None:
            return self.reject(job, refusal)
        job.on_end(self._forget)
        waiting = _Countdown(len(after), partial(self._enqueue, job))
        for earlier in after:
            earlier.on_end(waiting.count)
        return job

    def reject(self, job: Job, error: JobError | StoreError) -> Job:
        """Ends a job that was not taken, and counts it."""
        job.on_end(self.count)
        job.fail(error)
        return job

    @property
    def num_alive(self) -> int:
        """Jobs that have not ended."""
        return len(self._alive)

    @property
    def num_hung(self) -> int:
        """Store calls that go on although their job's time is up."""
        with self._changed:
            self._in_store = {job for job in self._in_store if job.is_in_store}
            return sum(job.is_hung for job in self._in_store)

    def close(self, drain_s: float) -> None:
        """Lets jobs run for up to `drain_s`, ends the rest, stops the threads. Twice is fine."""
        if os.getpid() != self._pid or self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._alive, drain_s)
            rest = list(self._alive)
        for job in rest:
            job.end(Reason.CLOSED, PoolClosed("the pool was closed"))
        limit = Deadline(_JOIN_S)
        with self._changed:
            self._changed.notify_all()
        stuck = sum(not worker.join(limit.remaining_s()) for worker in self._workers)
        self._clock.stop(_JOIN_S)
        for gauge in (self._metrics.hung_calls, self._metrics.jobs_alive):
            gauge.set_function(lambda: 0)  # the metrics live longer than the pool
        if stuck:
            log.warning("%d workers are still in a store call at close", stuck)

    def _refuse(self, job: Job) -> JobError | StoreError | None:
        num_hung = self.num_hung
        if num_hung > MAX_HUNG_CALLS:
            return StoreTimeout(f"{num_hung} store calls hang; waiting for one to return")
        with self._changed:
            if self._closed:
                return PoolClosed("the pool was closed")
            waiting = [b for j, b in self._waiting.items() if j.direction is job.direction]
            too_many = len(waiting) >= self._settings.queue_jobs
            too_big = waiting and sum(waiting) + job.num_bytes > self._settings.queue_bytes
            if job.num_bytes and (too_many or too_big):  # a marker is always taken
                return QueueFull(f"{len(waiting)} {job.direction.value} jobs wait already")
            self._alive.add(job)
            self._waiting[job] = job.num_bytes
        return None

    def _enqueue(self, job: Job) -> None:
        job.start_clock()
        with self._changed:
            if job not in self._alive:
                return
            self._queues[job.direction].append(job)
            self._num_queued += 1
            heapq.heappush(self._deadlines, (job.deadline.at, self._num_queued, job))
            is_next = self._deadlines[0][2] is job
            self._changed.notify_all()
        if is_next:
            self._clock.wake()

    def _take(self, directions: Sequence[Direction]) -> Job | None:
        """The next job for a worker that serves these directions, in order; None at the end."""
        with self._changed:
            while True:
                for direction in directions:
                    if self._queues[direction]:
                        job = self._queues[direction].popleft()
                        self._waiting.pop(job, None)
                        return job
                if self._closed and not self._alive:
                    return None
                self._changed.wait()

    def _forget(self, job: Job) -> None:
        """The end of a job, whoever ended it."""
        self.count(job)
        with self._changed:
            self._alive.discard(job)
            self._waiting.pop(job, None)
            with contextlib.suppress(ValueError):
                self._queues[job.direction].remove(job)
            if job.is_in_store:
                self._in_store.add(job)
            self._changed.notify_all()

    def count(self, job: Job) -> None:
        """Counts the end of a job that is not a part of another one."""
        if job.is_part:
            return
        result = job.result
        assert result is not None
        seconds = time.monotonic() - job.submitted_at
        self._metrics.job_ended(job.direction, result.reason, seconds)

    def _end_late_jobs(self) -> float | None:
        now, late, pause = time.monotonic(), [], None
        with self._changed:
            while self._deadlines and pause is None:
                at, _, job = self._deadlines[0]
                if at <= now or job.done:
                    late.append(heapq.heappop(self._deadlines)[2])
                else:
                    pause = at - now
        for job in late:
            job.end(Reason.DEADLINE, JobDeadline("the job's time was up"))
        return pause


class _Countdown:
    """Calls a function once `count` has been called n times; at once for n = 0."""

    def __init__(self, n: int, function: Callable[[], None]) -> None:
        self._left = n
        self._function = function
        self._lock = threading.Lock()
        if n == 0:
            function()

    def count(self, job: Job) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._function()


def _directions_of(worker: int) -> tuple[Direction, ...]:
    """Worker 0 is kept for loads, worker 1 for saves; the others do both, loads first."""
    kept = {0: (Direction.LOAD,), 1: (Direction.SAVE,)}
    return kept.get(worker, (Direction.LOAD, Direction.SAVE))
