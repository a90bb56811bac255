"""Jobs for tests, whose work is a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdstore.errors import Direction, JobResult, Reason
from pdstore.worker.job import Job, Shortfall, Urgency, Work, WorkerTurn, WorkItem

LOAD, SAVE = Direction.LOAD, Direction.SAVE
Body = Callable[[WorkerTurn], Reason | None]


@dataclass(eq=False)
class BodyItem(WorkItem):
    """An item whose work is a function."""

    body: Body


class Shares(Work[BodyItem]):
    """Work made of functions: the shares, and one for the end. The functions set its progress."""

    def __init__(
        self, *shares: Body, last: Body | None = None, at_once: int = 1, is_closed: bool = True
    ) -> None:
        super().__init__()
        self._at_once = at_once
        self._is_closed = is_closed
        self._waiting.extend(map(BodyItem, shares))
        self.last = last
        self.tokens = 0

    @property
    def progress(self) -> tuple[int, int, Mapping[int, int]]:
        return self.tokens, self.tokens, {}

    def _move(self, items: Sequence[BodyItem], child: WorkerTurn) -> Reason | None:
        reasons = [item.body(child) for item in items]
        return next(filter(None, reasons), None)

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
    return Job(direction, work, num_bytes=num_bytes, timeout_s=seconds, urgency=urgency)


def carry(job: Job) -> JobResult | None:
    """Does what a worker would do for a job now. Returns how it ended; None if it goes on."""
    while (turn := job.begin_turn()) is not None:
        try:
            with turn:
                while turn.do_share():
                    pass
        except Exception as error:  # noqa: BLE001, PERF203 - as the worker threads do
            job.fail(error)
    return job.result


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
