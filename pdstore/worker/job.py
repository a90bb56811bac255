"""Job: one save or load in flight. Work: what it has to do. WorkerTurn: one worker's work at it.

Each job has a lock, which guards the shares of its work, the running copies and its end. No store
call, copy or watcher runs while the lock is held. A signal handler must call nothing of this.
"""

# Decision: docs/decisions/003-end-and-copies.md
from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from pdstore.errors import (
    Direction,
    JobCancelled,
    JobError,
    JobResult,
    Reason,
    StoreError,
    reason_of,
    release_frames,
)
from pdstore.store.transfer import ReadyEvent, Shortfall
from pdstore.threads import Deadline, call_or

log = logging.getLogger(__name__)


class Urgency(enum.IntEnum):
    """The order in which workers begin jobs."""

    MARKER = 0  # a few bytes that another instance waits for; no queue limit refuses this job
    HANDOFF = 1  # another instance waits for these blocks, or for those after them
    ORDINARY = 2


@dataclass(eq=False)
class WorkItem:
    """A part of a job's work that one worker does: mostly a block range.

    ready: an event that fires when the model has computed what the item reads; None: it has.
    """

    ready: ReadyEvent | None = field(default=None, kw_only=True)


Item = TypeVar("Item", bound=WorkItem)


class Share(NamedTuple):
    """The next part of a job's work for one worker: an item, or a few that are moved together.

    move: moves the items. Returns why it did not move all, or None; may raise.
    ready: the event of the last item, on which the share must wait; None: it need not wait.
    num_ready: how many shares are ready, this one included: more workers could do the others.
    """

    move: Callable[[WorkerTurn], Reason | None]
    ready: ReadyEvent | None = None
    num_ready: int = 1

    @property
    def is_computed(self) -> bool:
        """False if the share must wait for the model."""
        ready = self.ready
        # if it cannot be asked, the share meets the error
        return ready is None or call_or(lambda: ready.query(), True)


class NoShare(enum.Enum):
    """Why a poll gives no share."""

    NOT_YET = enum.auto()  # none is ready; some may become ready
    DONE = enum.auto()  # all are begun, and no more will become ready


_ONLY_END = Share(lambda turn: None)
"""A share without values, for a job that has no other share left: a worker has to conclude it."""


@dataclass(eq=False)
class Work(Generic[Item]):
    """The work of a job, in shares that several workers can do at the same time.

    A subclass puts items in `_waiting`, and sets `_is_closed` when no more will come, while it
    holds `lock`. One that never has an item leaves both, and does all its work in `conclude`.
    """

    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _waiting: deque[Item] = field(default_factory=deque, init=False)
    _is_closed: bool = field(default=True, init=False)
    _at_once: int = field(default=1, init=False)  # so many items make a share
    _progress: int = field(default=0, init=False)

    @property
    def progress(self) -> tuple[int, int, Mapping[int, int]]:
        """The number of leading tokens that have been moved by now, and of those with drafts' KV.

        Third: of a load, how many tokens it has read from each of several tiers. The caller holds
        `lock`.
        """
        return self._progress, self._progress, {}

    def poll(self, *, takes: bool = False) -> Share | NoShare:
        """Returns the next share, or why there is none. The caller holds `lock`.

        takes: the caller will do the share, so that no other poll returns it.
        """
        count = min(self._at_once, len(self._waiting))
        if not count:
            return NoShare.DONE if self._is_closed else NoShare.NOT_YET
        num_ready = -(-len(self._waiting) // self._at_once)
        ready = self._waiting[count - 1].ready  # the last to fire
        items = [self._waiting.popleft() for _ in range(count)] if takes else []
        return Share(partial(self._move, items), ready, num_ready)

    def _move(self, items: Sequence[Item], turn: WorkerTurn) -> Reason | None:
        """Moves the items of one share; see `Share.move`."""
        raise NotImplementedError

    def conclude(self, turn: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        """Ends the job's work after its last share. Returns why not all work was done, or None.

        It is called a single time, without the lock.
        shortfall: the first shortfall of a share, or None. After a shortfall no share begins, so
          items may be left, and more of them might have come.
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
    timeout_s: begins when the job no longer waits for earlier jobs: that makes its deadline.
    num_with_drafts: of a load that has ended: how many leading tokens have the drafts' KV too. It
      is `result.num_tokens` if this rank has no layer of a draft.
    by_tier: of a load that has ended: its tokens by the tier they were read from; empty without.
    """

    def __init__(
        self,
        direction: Direction,
        work: Work[Any],
        *,
        timeout_s: float,
        num_bytes: int = 0,
        urgency: Urgency = Urgency.ORDINARY,
    ) -> None:
        self.direction = direction
        self.num_bytes = num_bytes
        self.urgency = urgency
        self.began = time.monotonic()
        self.deadline = Deadline(timeout_s)
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = work.lock
        self._work: Work[Any] | None = work  # None from the end on
        self._shortfall: Shortfall | None = None
        self._num_turns = 0
        self._is_finishing = False
        self._num_copies = 0
        self._is_ending = False
        self._end: Shortfall | None = None
        self._captured = False
        self._store_calls: tuple[float, float] | None = None
        self.num_with_drafts = 0
        self.by_tier: Mapping[int, int] = {}
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

    def peek(self) -> Share | NoShare:
        """Returns what one more worker would do, or why it would have nothing to do.

        If no share is left and no worker is at the job, one is needed to end it: that is a share.
        """
        with self._lock:
            return self._poll()

    def restart_timeout(self) -> None:
        """Moves the deadline, after the job has waited for earlier jobs."""
        # worker: waits for slots of staging until its turn's deadline, this object
        # model:  computes the next layers, and the queue calls this
        # So the object itself changes: after a new one the worker would give up at the old time.
        self.deadline.at = Deadline(self._timeout_s).at

    def begin_turn(self) -> WorkerTurn | None:
        """Adds a worker to the job; returns None if the worker would have nothing to do."""
        with self._lock:
            if isinstance(self._poll(), NoShare):
                return None
            self._num_turns += 1
            return WorkerTurn(self)

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

    def _poll(self, *, takes: bool = False) -> Share | NoShare:
        if self._work is None or self._is_ending or self._is_finishing:
            return NoShare.DONE
        polled = NoShare.DONE if self._shortfall else self._work.poll(takes=takes)
        return _ONLY_END if polled is NoShare.DONE and not self._num_turns else polled

    def _settle(self) -> None:
        """Sets the result and calls the watchers; only the first call does anything."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return
            num_tokens, self.num_with_drafts, self.by_tier = work.progress
        del work  # free what the work holds before anybody is told that the job is done
        reason, error = self._end or (None, None)
        if error is not None:
            release_frames(error)
        with self._lock:
            self._result = JobResult(num_tokens, reason, error)
            watchers, self._watchers = self._watchers, []
        self._has_ended.set()
        for watcher in watchers:
            call_or(partial(watcher, self), None)


@dataclass(eq=False)
class WorkerTurn:
    """One worker's work at a job: in a `with`, one share after the other.

    Only that worker's thread calls it, but any thread may read `is_hung`. The worker may leave one
    block copy running while it fills slots for the next copy (`finish_copy`). At the end of the
    `with` it waits for its copies. If then no share is left and no other worker is at the job, it
    ends the job. After an exception in the `with` the worker still counts as being at the job, so
    that no other worker ends the job before `Job.fail` is called.
    """

    job: Job
    _is_in_store: bool = field(default=False, init=False)
    _under_way: Callable[[], None] | None = field(default=None, init=False)
    may_wait: bool = field(default=True, init=False)

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
        """True while the worker is still in a store call although the deadline has passed."""
        return self._is_in_store and self.job.done and self.job.deadline.is_over()

    @property
    def has_copy_under_way(self) -> bool:
        return self._under_way is not None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish_copy()
        if kind is None:
            self._conclude()

    def do_share(self) -> bool:
        """Does the job's next share; returns False if there is none now.

        Raises what the share raises, except StoreErrors: these are noted as the job's shortfall.
        """
        job = self.job
        with job._lock:
            share = job._poll(takes=True)
        if isinstance(share, NoShare):
            return False
        shortfall: Shortfall | None = None
        try:
            reason = share.move(self)
            shortfall = None if reason is None else Shortfall(reason)
        except StoreError as error:
            shortfall = Shortfall(reason_of(error), error)
        with job._lock:
            job._shortfall = job._shortfall or shortfall
        return True

    def _conclude(self) -> None:
        """Concludes the work if nothing is left to do and no other worker is at the job."""
        job = self.job
        with job._lock:
            is_last = job._num_turns == 1 and job._poll() is NoShare.DONE and not job._is_ending
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
        # worker: reads _is_ending,      then counts its copy,   in one step by the lock
        # cancel: sets _is_ending, then reads _num_copies, in one step as well
        # So a copy that is not counted never begins, and the job ends after one that is.
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

    @contextlib.contextmanager
    def before_next_copy(self) -> Iterator[None]:
        """Surrounds copies that are made while the next copy, which runs already, has to wait."""
        following, self._under_way = self._under_way, None
        self.may_wait = following is None
        try:
            yield
        finally:
            try:
                self.finish_copy()
            finally:
                self.may_wait = True
                self._under_way = following
