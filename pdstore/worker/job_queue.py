"""JobQueue: decides which job each worker does next, and ends jobs at their deadlines.

One lock guards the ready jobs: for each direction a heap, and a list of those whose blocks the
model has not computed. While the lock is held, no job is run or ended, and no I/O is done, but a
device's events are asked. A job's own lock may be taken while this lock is held, never the other
way round. Nothing here may be called from a signal handler.
"""

# Decision: docs/decisions/016-shared-jobs.md
from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from prometheus_client import Gauge

from pdstore.async_runner import DevicePin
from pdstore.errors import (
    Direction,
    JobDeadline,
    JobError,
    PoolClosed,
    QueueFull,
    Reason,
    StoreError,
    StoreTimeout,
)
from pdstore.metrics import Metrics
from pdstore.threads import Deadline, Ticker, Worker
from pdstore.worker.job import Job, NoShare, Share, Urgency, WorkerTurn

log = logging.getLogger(__name__)

MAX_JOBS = 1024
MAX_BYTES = 64 << 30
MAX_HUNG_CALLS = 2
_MAX_ASKED = 8  # jobs that wait for the model; each choice asks so many of their events
_CHECK_INTERVAL_S = 0.1  # a job ends so many seconds after its deadline at the latest
STOP_TIMEOUT_S = 1.0
"""Seconds in which `close` puts the markers of hand-offs that it ended, and ends its threads."""

_Entry = tuple[Urgency, float, int, Job]
"""A ready job as a heap's entry: its urgency, the time of its deadline, a number, the job."""


class _Task(NamedTuple):
    """The task of a worker: its turn at a job, for as long as the queue chooses this job."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class JobQueue:
    """Runs jobs on worker threads; limits the number of jobs, their times and the time of a close.

    A worker does one share, of about 32 MiB, or of up to 256 MiB if the store is an arena. Then it
    chooses a job again: a marker first, then a job of a hand-off, then any other job; of equally
    urgent jobs, one of the direction that has fewer workers. If there are several workers, one
    direction never has all of them.

    A deadline ends a job, but the job's worker cannot take another job before its store call has
    returned. While more than MAX_HUNG_CALLS such calls hang, new jobs are refused at once.

    most_woken: how many workers an ordinary job wakes; those that are awake do its shares as well.
    max_jobs, max_bytes: limits for the jobs of one direction that no worker has begun. Markers
      count, but are never refused: another instance waits for them.
    Raises DeviceError when a worker cannot be put on its device.
    """

    def __init__(
        self,
        num_workers: int,
        pin: DevicePin,
        metrics: Metrics,
        most_woken: int = MAX_JOBS,
        max_jobs: int = MAX_JOBS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._most_woken = most_woken
        self._metrics = metrics
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._most_busy = max(1, num_workers - 1)  # workers that one direction may have
        lock = threading.RLock()
        self._has_ready = threading.Condition(lock)  # workers wait for it
        self._is_idle = threading.Condition(lock)  # `close` waits for it
        self._alive: dict[Job, None] = {}
        self._waiting: dict[Direction, dict[Job, None]] = {d: {} for d in Direction}
        self._ready: dict[Direction, list[_Entry]] = {d: [] for d in Direction}
        self._uncomputed: dict[Direction, list[Job]] = {d: [] for d in Direction}
        self._offered: set[Job] = set()  # the jobs in `_ready` and `_uncomputed`
        self._numbers = itertools.count()
        self._num_busy = dict.fromkeys(Direction, 0)
        self._turns: set[WorkerTurn] = set()
        self._timed: set[Job] = set()  # jobs that wait for no other job: their time runs
        self._is_closing = False
        self._is_closed = False
        self._closed = threading.Event()
        self._pid = os.getpid()
        for gauge, number in self._gauges():
            gauge.set_function(number)
        self._workers: list[Worker] = []
        self._clock = Ticker("pdstore-deadlines", self._end_late_jobs)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, 0.0)
            for i in range(num_workers):
                self._workers.append(Worker(f"pdstore-worker-{i}", self._next_task, pin.hold))
            undo.pop_all()

    def submit(self, job: Job, after: Sequence[Job] = ()) -> Job:
        """Queues a job that begins after the jobs in `after` have ended; ends it if refused."""
        try:
            self.check_process()
        except PoolClosed as error:
            job.fail(error)
            return job
        refusal = self._admit(job)
        if refusal is not None:
            return self.reject(job, refusal)
        job.on_end(self._forget)
        self._enqueue_after(list(after), job)
        return job

    def reject(self, job: Job, error: JobError | StoreError) -> Job:
        """Ends a job that is refused, and counts it in the metrics."""
        if not self.is_in_child:
            job.on_end(self._count_end)
        job.fail(error)
        return job

    def wake(self, job: Job) -> None:
        """Restarts a job's timeout; wakes workers for its new shares, or for its end."""
        if self.is_in_child:
            return
        with self._has_ready:
            if job in self._timed:
                job.restart_timeout()
                self._offer(job)

    @property
    def is_in_child(self) -> bool:
        """True in the child of a fork, where any lock of the pool may be held for ever."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises PoolClosed in the child of a fork."""
        if self.is_in_child:
            raise PoolClosed("the pool belongs to the parent process: open one after the fork")

    @property
    def num_alive(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._alive)

    @property
    def num_hung(self) -> int:
        """The number of store calls that go on although their job's deadline has passed."""
        if self.is_in_child:
            return 0
        with self._has_ready:
            return sum(turn.is_hung for turn in self._turns)

    @property
    def problem(self) -> str | None:
        """Says how many store calls hang; None if none does."""
        num_hung = self.num_hung
        return f"{num_hung} store calls hang" if num_hung else None

    def close(self, drain_s: float) -> bool:
        """Lets jobs run for up to `drain_s`, ends the other jobs, and stops the threads within 1 s.

        Hand-offs whose saves it ends are marked as failed before the threads stop. A second caller
        waits for the end of the first call. Returns True to the first caller; returns False to all
        others, and in the child of a fork.
        """
        if self.is_in_child:
            return False
        with self._has_ready:
            is_first = not self._is_closing
            self._is_closing = True
        if not is_first:
            self._closed.wait(drain_s + STOP_TIMEOUT_S)
            return False
        try:
            self._close(drain_s)
        finally:
            self._closed.set()
        return True

    def _close(self, drain_s: float) -> None:
        self._wait_until_idle(drain_s)
        self._end_all()
        deadline = Deadline(STOP_TIMEOUT_S)
        self._wait_until_idle(STOP_TIMEOUT_S / 2)  # time to put the markers of failed hand-offs
        with self._has_ready:
            self._is_closed = True
            self._has_ready.notify_all()
        self._end_all()
        stuck = sum(not worker.join(deadline.remaining_s()) for worker in self._workers)
        self._clock.stop(deadline.remaining_s())
        for gauge, _ in self._gauges():  # the metrics outlive the queue
            gauge.set_function(lambda: 0)
        if stuck:
            log.warning("%d workers are still in a store call at close", stuck)

    def _end_all(self) -> None:
        for job in list(self._alive):
            job.end_with(Reason.CLOSED, PoolClosed("the pool was closed"))

    def _wait_until_idle(self, timeout_s: float) -> None:
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._alive, timeout_s)

    def _admit(self, job: Job) -> JobError | StoreError | None:
        """Adds a job to the waiting ones and returns None, or returns why it must be refused."""
        num_hung = self.num_hung
        if num_hung > MAX_HUNG_CALLS:
            return StoreTimeout(f"{num_hung} store calls hang; waiting for one to return")
        is_marker = job.urgency is Urgency.MARKER
        with self._has_ready:
            if self._is_closed or (self._is_closing and not is_marker):
                return PoolClosed("the pool was closed")
            waiting = self._waiting[job.direction]
            is_too_big = waiting and _bytes_of(waiting) + job.num_bytes > self._max_bytes
            if (len(waiting) >= self._max_jobs or is_too_big) and not is_marker:
                return QueueFull(f"{len(waiting)} {job.direction.value} jobs wait already")
            self._alive[job] = None
            waiting[job] = None
        return None

    def _enqueue_after(self, earlier: list[Job], job: Job, _ended: Job | None = None) -> None:
        """Queues a job when all of the earlier ones have ended."""
        while earlier and earlier[-1].done:
            earlier.pop()
        if earlier:
            earlier[-1].on_end(partial(self._enqueue_after, earlier[:-1], job))
            return
        job.restart_timeout()
        with self._has_ready:
            if job not in self._alive:
                return
            self._timed.add(job)
            self._offer(job)

    def _offer(self, job: Job) -> None:
        """Offers a job to the workers; wakes one for each ready share, or one to end the job."""
        share = job.peek()
        if isinstance(share, NoShare):
            return
        if job not in self._offered:
            self._offered.add(job)
            self._push(job)
        num_ready = share.num_ready
        is_ordinary = job.urgency is Urgency.ORDINARY
        self._has_ready.notify(min(num_ready, self._most_woken) if is_ordinary else num_ready)

    def _next_task(self) -> _Task | None:
        """Waits for a job and returns a turn at it; None after the queue is closed."""
        with self._has_ready:
            while not self._is_closed:
                job = self._choose()
                if job is None:
                    self._has_ready.wait()
                elif (turn := job.begin_turn()) is not None:
                    self._waiting[job.direction].pop(job, None)
                    self._num_busy[job.direction] += 1
                    self._turns.add(turn)
                    return _Task(partial(self._run, turn), partial(self._fail, turn))
        return None

    def _run(self, turn: WorkerTurn) -> None:
        """Does shares of a job until none is left or until the worker should do another job."""
        with turn:
            while turn.do_share() and self._should_continue(turn.job):
                pass
        self._on_leave(turn)

    def _fail(self, turn: WorkerTurn, error: Exception) -> None:
        """Ends the whole job after `_run` has raised an exception."""
        self._on_leave(turn)
        turn.job.fail(error)

    def _choose(self) -> Job | None:
        """Returns the job that a free worker should do next; None if no job is ready.

        A share that the model has not computed keeps its worker waiting. So it comes after the
        computed shares of equally urgent jobs, and then the job that was made first comes first.
        """
        firsts: list[tuple[Job, bool]] = []  # with True: its share must wait for the model
        for direction in Direction:
            if self._num_busy[direction] < self._most_busy:
                self._promote_computed(direction)
                firsts += [(entry[-1], False) for entry in self._ready[direction][:1]]
                firsts += [(job, True) for job in self._uncomputed[direction][:1]]
        chosen = min(
            firsts,
            key=lambda first: (first[0].urgency, first[1], self._num_busy[first[0].direction]),
            default=None,
        )
        return None if chosen is None else chosen[0]

    def _promote_computed(self, direction: Direction) -> None:
        """Moves jobs between `_ready` and `_uncomputed`, by whether their share is computed.

        Asks only a few uncomputed jobs: the model computes those first that were made first.
        """
        ready, uncomputed = self._ready[direction], self._uncomputed[direction]
        for job in uncomputed[:_MAX_ASKED]:
            share = job.peek()
            if isinstance(share, NoShare) or share.is_computed:
                uncomputed.remove(job)
                self._push(job)
        while ready:
            job = ready[0][-1]
            share = job.peek()
            if isinstance(share, Share) and share.is_computed:
                break
            heappop(ready)
            if isinstance(share, Share):
                insort(uncomputed, job, key=lambda job: (job.urgency, job.began))
            else:
                self._offered.discard(job)

    def _push(self, job: Job) -> None:
        entry = (job.urgency, job.deadline.at, next(self._numbers), job)
        heappush(self._ready[job.direction], entry)

    def _should_continue(self, job: Job) -> bool:
        """True if the worker that has just done a share of a job should do the job's next share."""
        with self._has_ready:
            self._num_busy[job.direction] -= 1
            try:
                chosen = self._choose()
            finally:
                self._num_busy[job.direction] += 1
            if chosen is not job and isinstance(job.peek(), Share):
                self._has_ready.notify()  # another worker may do the shares that are left
        return chosen is job

    def _on_leave(self, turn: WorkerTurn) -> None:
        with self._has_ready:
            self._num_busy[turn.job.direction] -= 1
            self._turns.discard(turn)

    def _forget(self, job: Job) -> None:
        """Removes a job that has ended from the queue, and counts its end."""
        with self._has_ready:
            self._alive.pop(job, None)
            self._waiting[job.direction].pop(job, None)
            self._timed.discard(job)
            if not self._alive:
                self._is_idle.notify_all()
        self._count_end(job)

    def _count_end(self, job: Job) -> None:
        result = job.result
        assert result is not None
        seconds = time.monotonic() - job.began
        self._metrics.job_ended(job.direction, result.reason, seconds, result.error)

    def _end_late_jobs(self) -> float:
        now = time.monotonic()
        with self._has_ready:
            late = [job for job in self._timed if job.deadline.at <= now]
        for job in late:
            job.end_with(Reason.DEADLINE, JobDeadline("the job's time was up"))
        return _CHECK_INTERVAL_S

    def _gauges(self) -> list[tuple[Gauge, Callable[[], int]]]:
        """Returns gauges, each with a function for its value, which is called without the lock."""
        gauges: list[tuple[Gauge, Callable[[], int]]] = [
            (self._metrics.jobs_alive, lambda: self.num_alive),
            (self._metrics.hung_store_calls, lambda: self.num_hung),
        ]
        for way, waiting in self._waiting.items():
            num_bytes = partial(_bytes_of, waiting)
            gauges.append((self._metrics.queue_jobs.labels(way.value), partial(len, waiting)))
            gauges.append((self._metrics.queue_bytes.labels(way.value), num_bytes))
        return gauges


def _bytes_of(jobs: dict[Job, None]) -> int:
    return sum(job.num_bytes for job in list(jobs))
