"""JobRun: a job as the queue and its workers see it."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable

from pdstore.errors import JobError, StoreError
from pdstore.outcome import Direction, JobResult, Reason, reason_of
from pdstore.threads import Deadline
from pdstore.worker.busy_time import BusyTime
from pdstore.worker.child_job import ChildJob
from pdstore.worker.job import Job
from pdstore.worker.work import Shortfall, Work

log = logging.getLogger(__name__)


class Urgency(enum.IntEnum):
    """Which jobs of one direction workers take first."""

    MARKER = 0  # a few bytes that another instance waits for; no bound refuses it
    HANDOFF = 1  # another instance waits for all of it
    ORDINARY = 2


class JobRun:
    """One job's work, which child jobs on several workers do together.

    The end of a job and its block copies exclude each other. An end that comes during copies takes
    effect when the last of them is over, and no copy begins after it. So a late answer of the store
    never reaches blocks that the engine has given to someone else.

    `end` takes no lock, because a signal handler may call it at any instruction of its thread. An
    end is appended before the copies are counted, and a copy is counted before the ends are looked
    at: so one of the two sees the other.

    seconds: time from when the job may run.
    """

    def __init__(
        self,
        direction: Direction,
        work: Work,
        *,
        num_bytes: int,
        seconds: float,
        urgency: Urgency = Urgency.ORDINARY,
    ) -> None:
        self.direction, self.num_bytes, self.urgency = direction, num_bytes, urgency
        self.job = Job(direction, self.end)
        self.deadline = Deadline(seconds)
        self._seconds = seconds
        self._work: Work | None = work
        self._lock = threading.Lock()  # workers' only
        self._children: set[ChildJob] = set()
        self._busy = BusyTime()
        self._shortfall: Shortfall | None = None
        self._is_finishing = False
        self._copies: list[None] = []  # one entry for each that runs
        self._ends: list[Shortfall | None] = []  # the first one counts

    @property
    def is_ending(self) -> bool:
        """True if the end has come, or comes right after the copies that run now."""
        return bool(self._ends)

    @property
    def num_left(self) -> int:
        """Shares that wait for a worker."""
        work = self._work
        return 0 if work is None or self._shortfall else work.num_ready

    @property
    def has_more(self) -> bool:
        """True if there is something to do for one more worker."""
        with self._lock:
            return self._has_more()

    def start_clock(self) -> None:
        """Starts the time limit: waiting for other jobs does not count."""
        self.deadline = Deadline(self._seconds)

    def take(self, goes_on: Callable[[JobRun], bool]) -> ChildJob | None:
        """Puts one more worker to the job; None if there is nothing to do for it."""
        with self._lock:
            if not self._has_more():
                return None
            child = ChildJob(self, goes_on)
            self._children.add(child)
            return child

    def carry(self, child: ChildJob, goes_on: Callable[[JobRun], bool]) -> None:
        """Does a child job's part, on its worker. Raises what is no error of the store.

        Then the child job stays on the list until `fail` has ended the job: without it another
        worker would see a job whose shares are all taken and nobody at work, and finish it.
        """
        with self._busy:
            try:
                self._carry_shares(child, goes_on)
            finally:
                child.finish_copy()
        if not self._leaves(child):
            self._finish(child)

    def end(self, reason: Reason | None, error: Exception | None = None) -> None:
        """Ends the job unless it has ended; during block copies, right after them."""
        self._ends.append(None if reason is None else Shortfall(reason, error))
        if not self._copies:
            self._settle()

    def fail(self, error: Exception) -> None:
        """Ends the job with an exception."""
        reason = reason_of(error)
        if reason is Reason.FAULT and not self.is_ending:
            log.error("a %s failed: %r", self.direction.value, error)
        self.end(reason, error)

    def fall_short(self, reason: Reason, error: Exception | None = None) -> None:
        """Says why the job will do less than all of its work: no further share is begun."""
        with self._lock:
            self._shortfall = self._shortfall or Shortfall(reason, error)

    def check(self) -> None:
        """Raises JobError when the job has ended."""
        if self.is_ending:
            raise JobError("the job has ended")

    def begin_copy(self) -> None:
        """Holds up the job's end. Raises JobError when it has come."""
        self._copies.append(None)
        if self._ends:
            self.end_copy()
            self.check()

    def end_copy(self) -> None:
        """Lets the job end, if an end came during the copy and no other copy runs."""
        self._copies.pop()
        if self._ends and not self._copies:
            self._settle()

    def _carry_shares(self, child: ChildJob, goes_on: Callable[[JobRun], bool]) -> None:
        while True:
            with self._lock:
                work = self._work
                if self.is_ending or work is None or self.num_left == 0:
                    return
                share = work.take()
            try:
                reason = share(child)
            except StoreError as error:
                self.fall_short(reason_of(error), error)
            else:
                if reason is not None:
                    self.fall_short(reason)
            del share
            if not goes_on(self):
                return

    def _leaves(self, child: ChildJob) -> bool:
        """Takes a child job away, unless it is the last one and only `finish` is left to do."""
        with self._lock:
            self._is_finishing = (
                self._children == {child} and self._is_at_end() and not self.is_ending
            )
            if not self._is_finishing:
                self._children.discard(child)
            return not self._is_finishing

    def _has_more(self) -> bool:
        if self.is_ending or self._is_finishing:
            return False
        return self.num_left > 0 or (not self._children and self._is_at_end())

    def _is_at_end(self) -> bool:
        work = self._work
        return work is None or self._shortfall is not None or work.is_at_end

    def _finish(self, child: ChildJob) -> None:
        work = self._work
        if work is None:
            return
        shortfall = work.finish(child, self._shortfall)
        del work  # what it holds is released before anyone hears that the job is done
        if shortfall is None:
            self.end(None)
        else:
            self.end(*shortfall)

    def _settle(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # another thread settles the job, or has done so
        progress = work.progress
        del work
        reason, error = self._ends[0] or (None, None)
        if error is not None:
            _release_frames(error)
        self.job.settle(JobResult(progress, reason, error, self._busy.seconds))


def _release_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and its causes: their frames hold slots and tensors."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            rest += (each.__cause__, each.__context__)
