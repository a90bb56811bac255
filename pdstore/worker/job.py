"""One save or load in flight: its state, its deadline, its hold on the paged cache."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from pdstore.errors import (
    JobCancelled,
    JobError,
)
from pdstore.outcome import Direction, JobResult, Reason, reason_of
from pdstore.threads import Deadline, call_each

log = logging.getLogger(__name__)

Body = Callable[["Job"], "Reason | None"]


class Job:
    """One save or load in flight. KVPool makes it; any thread may ask and wait.

    A job ends exactly once: with what its body did, at its deadline, by `cancel`, or when the pool
    closes. When it has ended, nothing of it reads or writes the paged cache any more.

    body: does the work on a worker thread. It raises, or returns why it did less than all; it keeps
      `progress` up to date and gives back what it holds.
    seconds: time from when the job may run.
    """

    def __init__(
        self, direction: Direction, body: Body, *, num_bytes: int, seconds: float, progress: int = 0
    ) -> None:
        self.direction = direction
        self.num_bytes = num_bytes
        self.is_part = False  # of another job, which is counted instead
        self.progress = progress  # leading tokens that are where they should be by now
        self.submitted_at = time.monotonic()
        self.deadline = Deadline(seconds)
        self._seconds = seconds
        self._body: Body | None = body
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._result: JobResult | None = None
        self._watchers: list[Callable[[Job], None]] = []
        self._captured = False
        self._touching = False
        self._in_store = False
        self._late_end: tuple[Reason, Exception] | None = None  # asked for during a block copy

    @property
    def done(self) -> bool:
        """The job has ended; `result` says how."""
        return self._ended.is_set()

    @property
    def captured(self) -> bool:
        """Of a save: its source blocks are copied out, or never will be: they may be reused."""
        return self._captured or self.done

    @property
    def durable(self) -> bool:
        """Of a save: all of it can be loaded by another process."""
        result = self.result
        return result is not None and result.reason is None

    @property
    def result(self) -> JobResult | None:
        """How the job ended; None before."""
        return self._result if self.done else None

    @property
    def is_in_store(self) -> bool:
        """Its worker is in a store call, whether the job has ended or not."""
        return self._in_store

    @property
    def is_hung(self) -> bool:
        """The job's time is up, and its worker is still in a store call."""
        return self._in_store and self.done and self.deadline.is_over()

    def wait(self, timeout_s: float) -> JobResult:
        """Waits for the end. Raises TimeoutError when the job still runs after the time."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the {self.direction.value} still runs after {timeout_s} s")
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Ends the job, a block copy that runs excepted: then it ends right after."""
        self.end(Reason.CANCELLED, JobCancelled("cancelled by its owner"))

    def on_end(self, watcher: Callable[[Job], None]) -> None:
        """Calls `watcher(job)` when the job has ended, at once if it has; from any thread."""
        with self._lock:
            if self._result is None:
                self._watchers.append(watcher)
                return
        call_each([partial(watcher, self)])

    # What follows is for the body, the worker and the queue.

    def end(self, reason: Reason | None, error: Exception | None = None) -> None:
        """Ends the job unless it has ended; during a block copy, right after it."""
        with self._lock:
            if self._result is not None:
                return
            if self._touching:
                if error is not None and reason is not None:
                    self._late_end = self._late_end or (reason, error)
                return
            self._settle(reason, error)
        self._announce()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Around all that touches the paged cache. Raises JobError when the job has ended."""
        with self._lock:
            self._raise_if_ended()
            self._touching = True
        try:
            yield
        finally:
            with self._lock:
                self._touching = False
                late = self._late_end
                if late is not None:
                    self._settle(*late)
            if late is not None:
                self._announce()

    @contextlib.contextmanager
    def in_store_call(self) -> Iterator[None]:
        """Around every call of the store. Raises JobError before or after it when the job ended."""
        self.check()
        self._in_store = True
        try:
            yield
        finally:
            self._in_store = False
        self.check()

    def check(self) -> None:
        """Raises JobError when the job has ended: the body then only gives back what it holds."""
        with self._lock:
            self._raise_if_ended()

    def set_captured(self) -> None:
        self._captured = True

    def start_clock(self) -> None:
        """The deadline counts from when the job may run, not while it waits for other jobs."""
        self.deadline = Deadline(self._seconds)

    def run(self) -> None:
        """Does the work, on the worker that took the job."""
        with self._lock:
            body, self._body = self._body, None
            if body is None or self._result is not None:
                return
        reason = body(self)
        del body  # what the body holds is released before anyone hears that the job is done
        self.end(reason)

    def fail(self, error: Exception) -> None:
        """Ends the job with an exception."""
        reason = reason_of(error)
        if reason is Reason.FAULT and not self.done:
            log.error("a %s failed: %r", self.direction.value, error)
        self.end(reason, error.with_traceback(None))

    def _settle(self, reason: Reason | None, error: Exception | None) -> None:
        self._result = JobResult(self.progress, reason, error)
        self._body = None
        self._ended.set()  # with the lock: who sees a result sees a job that is done

    def _announce(self) -> None:
        with self._lock:
            watchers, self._watchers = self._watchers, []
        call_each(partial(watcher, self) for watcher in watchers)

    def _raise_if_ended(self) -> None:
        if self._result is not None:
            raise JobError("the job has ended")
