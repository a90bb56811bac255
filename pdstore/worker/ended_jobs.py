"""EndedJobs: counts how jobs end in the metrics, never from a signal handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pdstore.metrics import Metrics
from pdstore.worker.job_run import JobRun


class EndedJobs:
    """Jobs that have ended and are not counted yet.

    Counters have locks that a signal handler must not wait for, and handlers run on the main
    thread: what ends there is counted by another thread's next `count`.

    wake: makes another thread call `count` soon.
    """

    def __init__(self, metrics: Metrics, wake: Callable[[], None]) -> None:
        self._metrics, self._wake = metrics, wake
        self._runs: deque[JobRun] = deque()

    def add(self, run: JobRun) -> None:
        """Takes a job that has its result."""
        self._runs.append(run)
        if threading.current_thread() is threading.main_thread():
            self._wake()
        else:
            self.count()

    def count(self) -> None:
        """Counts all that were added."""
        while self._runs:
            try:
                run = self._runs.popleft()
            except IndexError:  # another thread was faster
                return
            result = run.job.result
            assert result is not None
            seconds = time.monotonic() - run.job.began
            self._metrics.job_ended(run.direction, result.reason, seconds, result.error)
