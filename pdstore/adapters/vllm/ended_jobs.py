"""EndedJobs: the loads and saves of one rank that have ended, on their way to the scheduler."""

from __future__ import annotations

import contextlib
import queue
import time

from pdstore.adapters.vllm.messages import EndedJob, Interval
from pdstore.worker.job import Job


class EndedJobs:
    """Collects the jobs that have ended since the last report. Jobs end on any thread.

    One thread takes.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[EndedJob] = queue.SimpleQueue()  # its `put` is reentrant

    def watch(self, request_id: str, job: Job, number: int | None = None) -> None:
        """Takes up a job that has begun, or even ended; `number` is that of a save."""
        job.on_end(lambda ended: self._ended.put(_told(request_id, number, ended)))

    def take(self) -> list[EndedJob]:
        """Returns the jobs that have ended since the last call."""
        ended: list[EndedJob] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended


def _told(request_id: str, number: int | None, job: Job) -> EndedJob:
    result, calls, now = job.result, job.in_store, time.monotonic()
    assert result is not None
    zero = time.time() - now  # monotonic seconds are this host's own
    return EndedJob(
        request_id,
        number,
        job.direction,
        result.num_tokens,
        result.reason,
        Interval(zero + job.began, zero + now),
        Interval(zero + calls[0], zero + calls[1]) if calls is not None else None,
    )
