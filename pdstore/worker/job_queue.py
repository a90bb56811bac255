"""JobQueue: which job's work each worker does next, and until when.

Locking. The condition guards the collections; no job is run, ended or told under it, and no I/O is
done. Job runs' locks may be taken under it, never the other way round. A signal handler may call
everything here while its own thread is inside. So a job is added first, and only then the queue is
asked whether it is closed; and collections are copied before they are looped over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from pdstore.device_pin import DevicePin
from pdstore.errors import JobDeadline, JobError, PoolClosed, StoreError, StoreTimeout
from pdstore.metrics import Metrics
from pdstore.outcome import Direction, Reason
from pdstore.settings import Settings
from pdstore.threads import Deadline, Latch, Ticker, Worker
from pdstore.worker.child_job import ChildJob
from pdstore.worker.countdown import Countdown
from pdstore.worker.ended_jobs import EndedJobs
from pdstore.worker.idle_workers import IdleWorkers
from pdstore.worker.job import Job
from pdstore.worker.job_run import JobRun, Urgency
from pdstore.worker.queue_gauges import QueueGauges
from pdstore.worker.ready_jobs import ReadyJobs
from pdstore.worker.waiting_jobs import WaitingJobs

log = logging.getLogger(__name__)

MAX_HUNG_CALLS = 2
STOP_S = 1.0
"""Time for the markers of what a close has cut, and for the threads to end."""
_LOOK_S = 0.05


class JobQueue:
    """Runs jobs on worker threads, with bounds on the queues, on time and on the close.

    A worker takes a share of about 32 MiB, of a save into an arena of up to 256, and then looks
    again whose turn it is. Markers come first, then the jobs of hand-offs, then the others. Of
    equals, every other worker takes the oldest job and the rest take the one with the fewest shares
    left: a small job passes large ones, and no job starves. A worker is kept for each direction;
    the others take the direction that fewer of them serve.

    A deadline ends the job; its worker stays out of service until the store call has really
    returned. While more than MAX_HUNG_CALLS such calls are out, new jobs are refused at once.

    waiting: the bounds on what waits; None: the usual ones.
    Raises DeviceError when a worker cannot be put on its device.
    """

    def __init__(
        self,
        settings: Settings,
        pin: DevicePin,
        metrics: Metrics,
        waiting: WaitingJobs | None = None,
    ) -> None:
        self._metrics = metrics
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._idle = IdleWorkers(lock)
        self._ready = ReadyJobs()
        self._waiting = waiting or WaitingJobs()
        self._alive: dict[JobRun, None] = {}
        self._num_busy = dict.fromkeys(Direction, 0)
        self._children: set[ChildJob] = set()
        self._deadlines: dict[JobRun, float] = {}
        self._next_deadline = float("inf")
        self._is_closing = self._is_closed = False
        self._closer: int | None = None
        self._closed = Latch()
        self._pid = os.getpid()
        self._gauges = QueueGauges(
            metrics,
            num_alive=lambda: self.num_alive,
            num_hung=lambda: self.num_hung,
            waiting=self._waiting,
        )
        self._workers: list[Worker] = []
        self._ended = EndedJobs(metrics, lambda: self._clock.wake())
        self._clock = Ticker("pdstore-deadlines", self._end_late_jobs)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, 0.0)
            for i in range(settings.workers):
                self._workers.append(Worker(f"pdstore-worker-{i}", partial(self._take, i), pin))
            undo.pop_all()

    def submit(self, run: JobRun, after: Sequence[Job] = ()) -> Job:
        """Queues a job, behind those in `after`. A refused one comes back ended, with a reason."""
        if self._is_in_child:
            run.fail(PoolClosed("the pool belongs to the parent process: open one after the fork"))
            return run.job
        run.job.on_end(lambda _: self._forget(run))
        refusal = self._admit(run)
        if refusal is not None:
            run.fail(refusal)
            return run.job
        waiting = Countdown(len(after), partial(self._enqueue, run))
        for earlier in after:
            earlier.on_end(waiting.count)
        return run.job

    def reject(self, run: JobRun, error: JobError | StoreError) -> Job:
        """Ends a job that was not taken, and counts it."""
        if not self._is_in_child:
            run.job.on_end(lambda _: self._forget(run))
        run.fail(error)
        return run.job

    def wake(self, run: JobRun) -> None:
        """Restarts a job's time limit; wakes workers if it has new shares, or for its end."""
        if self._is_in_child:
            return
        with self._changed:
            if run in self._deadlines:  # it waits for no other job
                run.start_clock()
                self._deadlines[run] = run.deadline.at
                if run.has_more:
                    self._make_ready(run)

    @property
    def num_alive(self) -> int:
        """Jobs that have not ended."""
        return len(self._alive)

    @property
    def num_hung(self) -> int:
        """Store calls that go on although their job's time is up."""
        if self._is_in_child:
            return 0
        with self._changed:
            return sum(child.is_hung for child in self._children.copy())

    @property
    def problem(self) -> str | None:
        """Says how many store calls hang; None if none does."""
        num_hung = self.num_hung
        return f"{num_hung} store calls hang" if num_hung else None

    def close(self, drain_s: float) -> bool:
        """Lets jobs run for up to `drain_s`, ends the rest, stops the threads in a second more.

        Twice is fine. Hand-offs that are cut are marked as failed before the threads stop. A second
        caller waits for the first; a signal handler that interrupts the first returns at once.
        Returns whether this was the first call; never in the child of a fork.
        """
        if self._is_in_child or self._closer == threading.get_ident():
            return False
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            self._closed.wait(drain_s + STOP_S)
            return False
        self._closer = threading.get_ident()
        try:
            self._close(drain_s)
        finally:
            self._closer = None
            self._closed.set()
        return True

    def _close(self, drain_s: float) -> None:
        self._wait_until_idle(drain_s)
        for run in list(self._alive):
            run.end(Reason.CLOSED, PoolClosed("the pool was closed"))
        limit = Deadline(STOP_S)
        self._wait_until_idle(STOP_S / 2)  # markers that say so
        with self._changed:
            self._is_closed = True
            self._idle.wake_all()
        for run in list(self._alive):
            run.end(Reason.CLOSED, PoolClosed("the pool was closed"))
        stuck = sum(not worker.join(limit.remaining_s()) for worker in self._workers)
        self._clock.stop(limit.remaining_s())
        self._ended.count()
        self._gauges.clear()
        if stuck:
            log.warning("%d workers are still in a store call at close", stuck)

    def _wait_until_idle(self, seconds: float) -> None:
        limit = Deadline(seconds)
        with self._changed:
            while self._alive and not limit.is_over():
                # a handler may have ended the last job after the look at it: look again
                self._changed.wait(min(_LOOK_S, limit.remaining_s()))

    @property
    def _is_in_child(self) -> bool:
        """True in the child of a fork, where any lock here may be held for ever."""
        return os.getpid() != self._pid

    def _admit(self, run: JobRun) -> JobError | StoreError | None:
        """Adds a job to those that wait. Returns why it cannot be taken, or None."""
        num_hung = self.num_hung
        if num_hung > MAX_HUNG_CALLS:
            return StoreTimeout(f"{num_hung} store calls hang; waiting for one to return")
        is_marker = run.urgency is Urgency.MARKER
        with self._changed:
            self._alive[run] = None
            full = self._waiting.add(run)
            if self._is_closed or (self._is_closing and not is_marker):
                return PoolClosed("the pool was closed")
        return full

    def _enqueue(self, run: JobRun) -> None:
        run.start_clock()
        with self._changed:
            if run not in self._alive:
                return
            self._deadlines[run] = run.deadline.at
            is_next = run.deadline.at < self._next_deadline
            if run.has_more:
                self._make_ready(run)
        if is_next:
            self._clock.wake()

    def _make_ready(self, run: JobRun) -> None:
        """Shows a job to the workers, and wakes one for each of its shares or for its end."""
        self._ready.add(run)
        self._idle.wake(run.direction, max(1, run.num_left))

    def _take(self, worker: int) -> _Turn | None:
        """Returns the next work of a worker; None at the end."""
        with self._changed:
            while True:
                child = self._next_child(worker)
                if child is not None:
                    self._num_busy[child.direction] += 1
                    self._children.add(child)
                    return _Turn(child, self._turn_ended)
                if self._is_closed:
                    return None
                self._idle.wait(worker)

    def _next_child(self, worker: int) -> ChildJob | None:
        while (run := self._ready.choose(worker, self._num_busy)) is not None:
            child = run.take(partial(self._goes_on, worker))
            if not run.has_more:
                self._ready.discard(run)
            if child is not None:
                self._waiting.discard(run)
                return child
        return None

    def _goes_on(self, worker: int, run: JobRun) -> bool:
        """True if it is still this job's turn on the worker that has just carried a share of it."""
        with self._changed:
            self._num_busy[run.direction] -= 1
            chosen = self._ready.choose(worker, self._num_busy)
            self._num_busy[run.direction] += 1
            if not run.has_more:
                self._ready.discard(run)
        return chosen is run

    def _turn_ended(self, child: ChildJob) -> None:
        with self._changed:
            self._num_busy[child.direction] -= 1
            self._children.discard(child)

    def _forget(self, run: JobRun) -> None:
        """Follows the end of a job, whoever ended it."""
        with self._changed:
            self._alive.pop(run, None)
            self._waiting.discard(run)
            self._ready.discard(run)
            self._deadlines.pop(run, None)
            self._changed.notify_all()
        self._ended.add(run)

    def _end_late_jobs(self) -> float | None:
        self._ended.count()
        now = time.monotonic()
        with self._changed:
            late = [run for run, at in self._deadlines.items() if at <= now]
            for run in late:
                del self._deadlines[run]
            # a planned turn stays: one for nothing costs less than a wake for each job to come
            planned = self._next_deadline if self._next_deadline > now else float("inf")
            self._next_deadline = min(self._deadlines.values(), default=planned)
            pause = None if self._next_deadline == float("inf") else self._next_deadline - now
        for run in late:
            run.end(Reason.DEADLINE, JobDeadline("the job's time was up"))
        return pause


class _Turn:
    """A child job's time on a worker."""

    def __init__(self, child: ChildJob, ended: Callable[[ChildJob], None]) -> None:
        self._child, self._ended = child, ended

    def run(self) -> None:
        self._child.run()
        self._ended(self._child)

    def fail(self, error: Exception) -> None:
        self._ended(self._child)
        self._child.fail(error)
