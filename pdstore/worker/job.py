"""Job: one save or load in flight. Work: what a job has to do. WorkerTurn: one worker's work at it.

Each job has a lock, which guards the shares of its work, the running copies and its end. No store
call, copy or watcher runs while the lock is held. Nothing here may be called from a signal handler,
which might wait for a lock that its own thread holds.
"""

# Decision: docs/decisions/003-end-and-copies.md
from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pdstore.errors import (
    Direction,
    JobCancelled,
    JobError,
    JobResult,
    Reason,
    StoreError,
    reason_of,
)
from pdstore.store.transfer import Shortfall
from pdstore.threads import Deadline, call_or

log = logging.getLogger(__name__)


class Urgency(enum.IntEnum):
    """The order in which workers begin jobs."""

    MARKER = 0  # a few bytes that another instance waits for; no queue limit refuses this job
    HANDOFF = 1  # another instance waits for these blocks, or for those after them
    ORDINARY = 2


@dataclass(eq=False)
class Work:
    """The work of a job, in shares that several workers can do at the same time.

    The job reads the properties and calls `next_share` while it holds `lock`. After the last share
    it calls `conclude` a single time, without the lock. After a shortfall no further share begins.
    This base class has no shares: a subclass that adds none does all its work in `conclude`.
    """

    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def progress(self) -> int:
        """The number of leading tokens of the prompt that have been moved by now."""
        return 0

    @property
    def num_ready(self) -> int:
        """The number of shares that can be begun now."""
        return 0

    @property
    def is_computed(self) -> bool:
        """False if the next share must wait for the model."""
        return True

    @property
    def is_at_end(self) -> bool:
        """True if all shares are begun and no more will become ready."""
        return True

    def next_share(self) -> Share:
        """Returns a share that is ready; the caller does it."""
        raise NotImplementedError

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        """Ends the job's work after its last share. Returns why not all work was done, or None.

        shortfall: the first shortfall of a share, or None. After a shortfall, shares may be left
          that nobody begins, and more of them might have become ready.
        May raise any exception that a share may raise.
        """
        return shortfall


class Job:
    """One save or load in flight. `KVPool` makes it; any thread may read it, wait and cancel.

    A job ends exactly once: when its work is done or has failed, at its deadline, by `cancel`, or
    when the pool closes. If this happens during block copies, the job ends after the last of these
    copies and begins no new one. So after its end nothing reads or writes the paged cache for the
    job any more, even if the store answers a call later.

    began: when the job was made, in monotonic seconds.
    seconds: the time limit; it begins when the job no longer waits for earlier jobs.
    """

    def __init__(
        self,
        direction: Direction,
        work: Work,
        *,
        seconds: float,
        num_bytes: int = 0,
        urgency: Urgency = Urgency.ORDINARY,
    ) -> None:
        self.direction = direction
        self.num_bytes = num_bytes
        self.urgency = urgency
        self.began = time.monotonic()
        self.deadline = Deadline(seconds)
        self._seconds = seconds
        self._pid = os.getpid()
        self._lock = work.lock
        self._work: Work | None = work  # None from the end on
        self._shortfall: Shortfall | None = None
        self._num_turns = 0
        self._is_finishing = False
        self._num_copies = 0
        self._is_ending = False
        self._end: Shortfall | None = None
        self._captured = False
        self._store_calls: tuple[float, float] | None = None
        self._watchers: list[Callable[[Job], None]] = []
        self._result: JobResult | None = None
        self._has_ended = threading.Event()

    @property
    def done(self) -> bool:
        """True if the job has ended; `result` says how."""
        return self._result is not None

    @property
    def captured(self) -> bool:
        """True if a save's engine blocks may be reused: they are copied out, or never will be."""
        return self._captured or self.done

    @property
    def durable(self) -> bool:
        """True if another process can load all blocks of a save."""
        return self._result is not None and self._result.reason is None

    @property
    def result(self) -> JobResult | None:
        """The job's outcome; None before the job has ended."""
        return self._result

    @property
    def in_store(self) -> tuple[float, float] | None:
        """When the job's first store call began and its last one ended, in monotonic seconds."""
        return self._store_calls

    def wait(self, timeout_s: float) -> JobResult:
        """Waits for the end. Raises TimeoutError if the job still runs after `timeout_s`."""
        self._has_ended.wait(max(0.0, timeout_s))
        if self._result is None:
            raise TimeoutError(f"the {self.direction.value} still runs after {timeout_s} s")
        return self._result

    def cancel(self) -> None:
        """Ends the job immediately, or right after the block copies that run now.

        In the child of a fork it does nothing: the job is the parent's.
        """
        if os.getpid() == self._pid:
            self.end_with(Reason.CANCELLED, JobCancelled("cancelled by its owner"))

    def on_end(self, watcher: Callable[[Job], None]) -> None:
        """Calls `watcher(job)` when the job ends, on any thread; if it has ended already, now."""
        with self._lock:
            if self._result is None:
                self._watchers.append(watcher)
                return
        call_or(partial(watcher, self), None)

    # What follows is for the queue and its workers.

    @property
    def num_ready(self) -> int:
        """The number of workers that a job can use: one for each ready share, or one at the end."""
        with self._lock:
            return self._num_ready()

    @property
    def is_computed(self) -> bool:
        """False if the next share must wait for the model."""
        with self._lock:
            return self._work is None or self._work.is_computed

    def start_clock(self) -> None:
        """Starts the time limit, after the job has waited for earlier jobs."""
        self.deadline.at = Deadline(self._seconds).at  # also for who waits until it already

    def begin_turn(
        self, goes_on: Callable[[Job], bool], left: Callable[[WorkerTurn], None]
    ) -> WorkerTurn | None:
        """Adds a worker to the job; returns None if the worker would have nothing to do.

        goes_on: called after each share; True if the worker should do the job's next share as well.
        left: called when the worker has left the job.
        """
        with self._lock:
            if not self._num_ready():
                return None
            self._num_turns += 1
            return WorkerTurn(self, goes_on, left)

    def end_with(self, reason: Reason | None, error: Exception | None = None) -> None:
        """Ends the job unless it has ended: immediately, or after block copies that run now."""
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                self._end = None if reason is None else Shortfall(reason, error)
            is_due = self._num_copies == 0
        if is_due:
            self._settle()

    def fail(self, error: Exception) -> None:
        """Ends the job with an exception."""
        reason = reason_of(error)
        if reason is Reason.FAULT and not self._is_ending:
            log.error("a %s failed: %r", self.direction.value, error)
        self.end_with(reason, error)

    def _num_ready(self) -> int:
        if self._is_ending or self._is_finishing:
            return 0
        return self._num_shares() or int(not self._num_turns and self._is_at_end())

    def _num_shares(self) -> int:
        return 0 if self._work is None or self._shortfall else self._work.num_ready

    def _is_at_end(self) -> bool:
        return self._work is None or self._shortfall is not None or self._work.is_at_end

    def _settle(self) -> None:
        """Sets the result and calls the watchers; only the first call does anything."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return
            progress = work.progress
        del work  # free what the work holds before anybody is told that the job is done
        reason, error = self._end or (None, None)
        if error is not None:
            _release_frames(error)
        with self._lock:
            self._result = JobResult(progress, reason, error)
            watchers, self._watchers = self._watchers, []
        self._has_ended.set()
        for watcher in watchers:
            call_or(partial(watcher, self), None)


@dataclass(eq=False)
class WorkerTurn:
    """One worker's work at a job: one share after the other.

    Only that worker's thread calls it, but any thread may read `is_hung`. The worker may leave one
    block copy running while it fills slots for the next copy (`finish_copy`). It waits for its
    copies before it leaves the job.
    """

    job: Job
    goes_on: Callable[[Job], bool]
    left: Callable[[WorkerTurn], None]
    _is_in_store: bool = field(default=False, init=False)
    _under_way: Callable[[], None] | None = field(default=None, init=False)

    @property
    def direction(self) -> Direction:
        return self.job.direction

    @property
    def deadline(self) -> Deadline:
        return self.job.deadline

    @property
    def is_over(self) -> bool:
        """True if the job has ended or will end after its copies: it may begin nothing new."""
        return self.job._is_ending

    @property
    def is_hung(self) -> bool:
        """True while the worker is still in a store call although the job's time is up."""
        return self._is_in_store and self.job.done and self.job.deadline.is_over()

    @property
    def has_copy_under_way(self) -> bool:
        return self._under_way is not None

    def run(self) -> None:
        """Does shares until none is left or until the worker should do another job.

        If no share is left and no other worker is at the job, it ends the job. Raises what a share
        raises, except StoreErrors. After such an exception the worker still counts as being at the
        job, so that no other worker ends the job before `fail` is called.
        """
        try:
            while (share := self._next_share()) is not None:
                shortfall: Shortfall | None = None
                try:
                    reason = share(self)
                    shortfall = None if reason is None else Shortfall(reason)
                except StoreError as error:
                    shortfall = Shortfall(reason_of(error), error)
                del share
                with self.job._lock:
                    self.job._shortfall = self.job._shortfall or shortfall
                if not self.goes_on(self.job):
                    break
        finally:
            self.finish_copy()
        self._conclude()
        self.left(self)

    def fail(self, error: Exception) -> None:
        """Ends the whole job after `run` has raised an exception."""
        self.left(self)
        self.job.fail(error)

    def _next_share(self) -> Share | None:
        job = self.job
        with job._lock:
            if job._is_ending or job._work is None or not job._num_shares():
                return None
            return job._work.next_share()

    def _conclude(self) -> None:
        """Concludes the work if nothing is left to do and no other worker is at the job."""
        job = self.job
        with job._lock:
            is_last = job._num_turns == 1 and job._is_at_end() and not job._is_ending
            work = job._work if is_last else None
            job._is_finishing = is_last
            if work is None:
                job._num_turns -= 1
                return
        shortfall = work.conclude(self, job._shortfall)
        del work
        job.end_with(*(shortfall or (None, None)))

    def raise_if_over(self) -> None:
        """Raises JobError if the job has ended; the caller then only gives back its slots."""
        if self.job._is_ending:
            raise JobError("the job has ended")

    def set_captured(self) -> None:
        """Says that the save's engine blocks are copied out, or need not be copied any more."""
        self.job._captured = True

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Surrounds a copy from or to the paged cache. Raises JobError if the job has ended."""
        job = self.job
        with job._lock:
            self.raise_if_over()
            job._num_copies += 1
        try:
            yield
        finally:
            with job._lock:
                job._num_copies -= 1
                is_due = job._is_ending and job._num_copies == 0
            if is_due:
                job._settle()

    @contextlib.contextmanager
    def in_store_call(self) -> Iterator[None]:
        """Surrounds a store call. Raises JobError before or after the call if the job has ended."""
        job = self.job
        self.raise_if_over()
        begin = time.monotonic()
        self._is_in_store = True
        try:
            yield
        finally:
            self._is_in_store = False
            end = time.monotonic()
            with job._lock:
                first, last = job._store_calls or (begin, end)
                job._store_calls = (min(first, begin), max(last, end))
        self.raise_if_over()

    def finish_copy(self, following: Callable[[], None] | None = None) -> None:
        """Waits for the copy in flight. `following` is the next one, which may run already.

        following: waits for the next copy, gives back its slots and ends its `copying`.
        """
        finish, self._under_way = self._under_way, following
        if finish is not None:
            finish()


Share = Callable[[WorkerTurn], Reason | None]
"""A function that moves some blocks. Returns why it did not move all, or None; may raise."""


def _release_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and of its causes, because they hold slots and tensors."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            rest += (each.__cause__, each.__context__)
