"""EndedJobs: the loads and saves of one rank that have ended, on their way to the scheduler."""

from __future__ import annotations

import collections
import time

from pdstore.adapters.vllm.messages import EndedJob, Interval
from pdstore.worker.job import Job


class EndedJobs:
    """Collects the jobs that have ended since the last report. Jobs end on any thread."""

    def __init__(self) -> None:
        self._ended: collections.deque[EndedJob] = collections.deque()

    def watch(self, request_id: str, job: Job, number: int | None = None) -> None:
        """Takes up a job that has just begun; `number` is that of a save."""
        begin = time.time()
        job.on_end(lambda ended: self._ended.append(_told(request_id, number, begin, ended)))

    def take(self) -> list[EndedJob]:
        """Returns the jobs that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


def _told(request_id: str, number: int | None, begin: float, job: Job) -> EndedJob:
    now, result, calls = time.time(), job.result, job.in_store
    assert result is not None
    in_store = None
    if calls is not None:
        zero = now - time.monotonic()  # monotonic seconds are this host's own
        in_store = Interval(zero + calls[0], zero + calls[1])
    return EndedJob(
        request_id,
        number,
        job.direction,
        result.num_tokens,
        result.reason,
        Interval(begin, now),
        in_store,
    )
