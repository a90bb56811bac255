"""ReadyJobs: the jobs that have a share for a worker, and whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from pdstore.outcome import Direction
from pdstore.worker.idle_workers import LOADS_ONLY, SAVES_ONLY
from pdstore.worker.job_run import JobRun, Urgency

_MOST_COMPARED = 64
"""Of many waiting jobs the oldest so many are compared, so that a choice stays cheap."""


class ReadyJobs:
    """Jobs in order of arrival, by urgency and direction. The queue's lock guards it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Urgency, Direction], dict[JobRun, None]] = {
            (urgency, direction): {} for urgency in Urgency for direction in Direction
        }

    def add(self, run: JobRun) -> None:
        self._runs[run.urgency, run.direction][run] = None

    def discard(self, run: JobRun) -> None:
        self._runs[run.urgency, run.direction].pop(run, None)

    def choose(self, worker: int, num_busy: Mapping[Direction, int]) -> JobRun | None:
        """Returns the job whose turn it is on a worker; None if it has nothing to do.

        The most urgent job comes first. Of equals, workers with an even number take the oldest, the
        others the one with the fewest shares left.
        num_busy: how many workers serve each direction now.
        """
        for urgency in Urgency:
            for direction in _directions_of(worker, num_busy):
                runs = self._runs[urgency, direction]
                if runs:
                    takes_oldest = worker % 2 == 0 or len(runs) == 1
                    first = islice(runs, 1 if takes_oldest else _MOST_COMPARED)
                    return min(first, key=lambda run: run.num_left)
        return None


def _directions_of(worker: int, num_busy: Mapping[Direction, int]) -> tuple[Direction, ...]:
    """Worker 0 is kept for loads and worker 1 for saves; the others help the fewer."""
    if worker in (LOADS_ONLY, SAVES_ONLY):
        return (Direction.LOAD,) if worker == LOADS_ONLY else (Direction.SAVE,)
    if num_busy[Direction.LOAD] > num_busy[Direction.SAVE]:
        return (Direction.SAVE, Direction.LOAD)
    return (Direction.LOAD, Direction.SAVE)
