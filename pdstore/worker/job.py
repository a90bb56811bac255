"""Job: one save or load in flight, as its owner sees it."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from pdstore.errors import JobCancelled
from pdstore.outcome import Direction, JobResult, Reason
from pdstore.threads import Latch, call_each

End = Callable[[Reason, Exception], None]


class Job:
    """One save or load in flight. `KVPool` makes it; any thread may ask, wait and cancel.

    A job ends exactly once: when its work is done or has failed, at its deadline, by `cancel`, or
    when the pool closes. After the end nothing reads or writes the paged cache for it any more.
    All methods may be called from a signal handler too.

    began: monotonic seconds; no call of the store is earlier.
    end: ends the work; `JobRun.end`.
    """

    def __init__(self, direction: Direction, end: End) -> None:
        self.direction = direction
        self.began = time.monotonic()
        self._end = end
        self._pid = os.getpid()
        self._latch = Latch()
        self._settling = threading.Lock()
        self._result: JobResult | None = None
        self._watchers: collections.deque[Callable[[Job], None]] = collections.deque()
        self._captured = False
        self._store_calls: tuple[float, float] | None = None

    @property
    def done(self) -> bool:
        """The job has ended; `result` says how."""
        return self._latch.is_set

    @property
    def captured(self) -> bool:
        """Of a save: its source blocks may be reused, because they are copied or never will be."""
        return self._captured or self.done

    @property
    def durable(self) -> bool:
        """Of a save: another process can load all of it."""
        result = self.result
        return result is not None and result.reason is None

    @property
    def result(self) -> JobResult | None:
        """The outcome; None before the job has ended."""
        return self._result if self.done else None

    @property
    def in_store(self) -> tuple[float, float] | None:
        """The first begin and the last end of its calls of the store, in monotonic seconds."""
        return self._store_calls

    def wait(self, timeout_s: float) -> JobResult:
        """Waits for the end. Raises TimeoutError if the job still runs after the time."""
        if not self._latch.wait(timeout_s):
            raise TimeoutError(f"the {self.direction.value} still runs after {timeout_s} s")
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Ends the job at once, or right after the block copies that run now.

        In the child of a fork it does nothing: the job is the parent's.
        """
        if os.getpid() == self._pid:
            self._end(Reason.CANCELLED, JobCancelled("cancelled by its owner"))

    def on_end(self, watcher: Callable[[Job], None]) -> None:
        """Calls `watcher(job)` once when the job has ended, or now if it has; on any thread."""
        self._watchers.append(watcher)
        if self.done:  # perhaps since the line above
            self._tell_watchers()

    def set_captured(self) -> None:
        """The run says: the source blocks are copied."""
        self._captured = True

    def note_store_call(self, begin: float, end: float) -> None:
        """The run says when a store call began and ended. Of two at once, one may be left out."""
        first, last = self._store_calls or (begin, end)
        self._store_calls = (min(first, begin), max(last, end))

    def settle(self, result: JobResult) -> None:
        """The run says how the job ended; only the first call counts."""
        if self._settling.acquire(blocking=False):
            self._result = result
            self._latch.set()
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        while self._watchers:
            try:
                watcher = self._watchers.popleft()
            except IndexError:  # another thread was faster
                return
            call_each([partial(watcher, self)])
