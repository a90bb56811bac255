"""SaveLedger: the saves that have not ended, and the first failure that nobody was told of."""

from __future__ import annotations

import collections
import itertools

from pdstore.errors import SaveFailed
from pdstore.outcome import JobResult, Reason
from pdstore.threads import Deadline
from pdstore.worker.job import Job


class SaveLedger:
    """Remembers saves for `flush`. Any thread may call it, and a signal handler.

    It has no lock: each change is one operation on a dict or a deque.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._running: dict[int, Job] = {}
        self._failures: collections.deque[JobResult] = collections.deque(maxlen=1)

    def add(self, job: Job) -> None:
        """Takes up a save, before it is submitted."""
        number = next(self._numbers)
        self._running[number] = job
        job.on_end(lambda _: self._end(number, job))

    def flush(self, timeout_s: float) -> None:
        """Waits for the end of all saves that were added before.

        Raises SaveFailed for the first that failed since the last flush, TimeoutError if one still
        runs after the time.
        """
        limit = Deadline(timeout_s)
        for number, job in list(self._running.items()):
            try:
                job.wait(limit.remaining_s())
            except TimeoutError:  # which names the time that was left
                raise TimeoutError(f"a save still runs after {timeout_s} s") from None
            self._end(number, job)
        try:
            result = self._failures.popleft()
        except IndexError:  # none, or another flush tells of it
            return
        reason = result.reason.value if result.reason else "unknown"
        raise SaveFailed(
            f"a save ended with {reason}; {result.num_tokens} leading tokens are durable"
        ) from result.error

    def _end(self, number: int, job: Job) -> None:
        """Notes the end of a save once, whoever calls first: the job or who waits for it."""
        if self._running.pop(number, None) is None:
            return
        result = job.result
        if result is None or result.reason in (None, Reason.CANCELLED) or self._failures:
            return
        self._failures.append(result)
