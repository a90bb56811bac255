"""WaitingJobs: the jobs that no worker has begun, and how many of them a pool may have."""

from __future__ import annotations

from pdstore.errors import QueueFull
from pdstore.outcome import Direction
from pdstore.worker.job_run import JobRun, Urgency

MAX_JOBS = 1024
MAX_BYTES = 64 << 30


class WaitingJobs:
    """Jobs and their bytes, by direction. The queue's lock guards it.

    max_jobs, max_bytes: the most that wait in a direction; what is more is dropped and counted.

    Markers count, but are never too many: another instance waits for them, and they are small.
    """

    def __init__(self, max_jobs: int = MAX_JOBS, max_bytes: int = MAX_BYTES) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._bytes: dict[Direction, dict[JobRun, int]] = {d: {} for d in Direction}

    def add(self, run: JobRun) -> QueueFull | None:
        """Adds a job. Returns the error to end it with if the others leave it no room."""
        others = list(self._bytes[run.direction].values())
        self._bytes[run.direction][run] = run.num_bytes
        if run.urgency is Urgency.MARKER:
            return None
        too_big = others and sum(others) + run.num_bytes > self._max_bytes
        if len(others) >= self._max_jobs or too_big:
            return QueueFull(f"{len(others)} {run.direction.value} jobs wait already")
        return None

    def num_jobs(self, direction: Direction) -> int:
        """Returns how many jobs of a direction wait. From any thread."""
        return len(self._bytes[direction])

    def num_bytes(self, direction: Direction) -> int:
        """Returns the bytes of the jobs of a direction that wait. From any thread."""
        return sum(self._bytes[direction].copy().values())

    def discard(self, run: JobRun) -> None:
        self._bytes[run.direction].pop(run, None)
