"""Jobs for tests, whose work is a function."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdstore.errors import Direction, JobResult, Reason
from pdstore.worker.job import Job, Share, Shortfall, Urgency, Work, WorkerTurn

LOAD, SAVE = Direction.LOAD, Direction.SAVE
Body = Callable[[WorkerTurn], Reason | None]


class Shares(Work):
    """Work made of functions: the shares, and one for the end. The functions set its progress."""

    def __init__(self, *shares: Share, last: Body | None = None) -> None:
        super().__init__()
        self.shares, self.last = list(shares), last
        self.tokens, self.is_closed = 0, True

    @property
    def progress(self) -> int:
        return self.tokens

    @property
    def num_ready(self) -> int:
        return len(self.shares)

    @property
    def is_at_end(self) -> bool:
        return self.is_closed and not self.shares

    def next_share(self) -> Share:
        return self.shares.pop(0)

    def conclude(self, child: WorkerTurn, shortfall: Shortfall | None) -> Shortfall | None:
        reason = self.last(child) if self.last is not None else None
        return shortfall if reason is None else Shortfall(reason)


def job_of(
    body: Body | Work = lambda child: None,
    direction: Direction = LOAD,
    seconds: float = 30.0,
    num_bytes: int = 1,
    urgency: Urgency = Urgency.ORDINARY,
) -> Job:
    work = body if isinstance(body, Work) else Shares(last=body)
    return Job(direction, work, num_bytes=num_bytes, seconds=seconds, urgency=urgency)


def ended(result: JobResult, direction: Direction = LOAD) -> Job:
    """Returns a job that has ended with this result."""
    work = Shares()
    work.tokens = result.num_tokens
    job = job_of(work, direction)
    job.end_with(result.reason, result.error)
    return job


class Gate:
    """Holds jobs inside a store call until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._inside: list[None] = []

    @property
    def num_inside(self) -> int:
        """The number of jobs that have come to the gate."""
        return len(self._inside)

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self._opened.wait(30)

    def pass_through(self, child: WorkerTurn) -> None:
        with child.in_store_call():
            self._inside.append(None)
            self.wait()


def held(gate: Gate, direction: Direction = LOAD, seconds: float = 30.0, num_bytes: int = 1) -> Job:
    """Starts a job that stays inside its store call until the gate opens."""
    return job_of(gate.pass_through, direction, seconds, num_bytes)
