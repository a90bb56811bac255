"""ChildJob: one worker's part of a job: a share after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pdstore.outcome import Direction
from pdstore.threads import Deadline

if TYPE_CHECKING:
    from pdstore.worker.job_run import JobRun, Urgency


class ChildJob:
    """One worker's part of a job. Only that worker's thread calls it, the properties excepted.

    A child job may leave one block copy under way while it fills slots for the next (`follow`).
    It waits for that copy before it leaves.

    goes_on: asked after each share; True if the worker takes the next one of this job, too.
    """

    def __init__(self, run: JobRun, goes_on: Callable[[JobRun], bool]) -> None:
        self._run, self._goes_on = run, goes_on
        self._is_in_store = False
        self._under_way: Callable[[], None] | None = None

    @property
    def direction(self) -> Direction:
        return self._run.direction

    @property
    def deadline(self) -> Deadline:
        return self._run.deadline

    @property
    def is_over(self) -> bool:
        """True if the job has ended or is about to: nothing may be begun for it."""
        return self._run.is_ending

    @property
    def is_in_store_call(self) -> bool:
        """True while its worker is in a store call, also after the end of the job."""
        return self._is_in_store

    @property
    def is_hung(self) -> bool:
        """True while its worker is still in a store call although the job's time is up."""
        return self._is_in_store and self._run.job.done and self.deadline.is_over()

    @property
    def urgency(self) -> Urgency:
        return self._run.urgency

    @property
    def num_left(self) -> int:
        """Shares of the job that wait for a worker."""
        return self._run.num_left

    @property
    def has_copy_under_way(self) -> bool:
        return self._under_way is not None

    def run(self) -> None:
        """Carries shares until none is left or another job's turn comes."""
        self._run.carry(self, self._goes_on)

    def fail(self, error: Exception) -> None:
        """Ends the whole job: `run` raised something that is no error of the store."""
        self._run.fail(error)

    def check(self) -> None:
        """Raises JobError when the job has ended: then only give back what is held."""
        self._run.check()

    def set_captured(self) -> None:
        """Says that the job's source blocks are copied, or are not needed any more."""
        self._run.job.set_captured()

    def begin_copy(self) -> None:
        """Before the paged cache is touched. Raises JobError when the job has ended."""
        self._run.begin_copy()

    def end_copy(self) -> None:
        """After each `begin_copy`: the paged cache is not touched any more."""
        self._run.end_copy()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Surrounds what touches the paged cache. Raises JobError when the job has ended."""
        self.begin_copy()
        try:
            yield
        finally:
            self.end_copy()

    @contextlib.contextmanager
    def in_store_call(self) -> Iterator[None]:
        """Surrounds a call of the store. Raises JobError before or after it if the job ended."""
        self.check()
        begin = time.monotonic()
        self._is_in_store = True
        try:
            yield
        finally:
            self._is_in_store = False
            self._run.job.note_store_call(begin, time.monotonic())
        self.check()

    def follow(self, finish: Callable[[], None]) -> None:
        """Leaves a copy under way, after waiting for the one before it.

        finish: waits for the copy, gives back its slots and its `begin_copy`.
        """
        self.finish_copy(finish)

    def finish_copy(self, following: Callable[[], None] | None = None) -> None:
        """Waits for the copy that is under way, if there is one."""
        finish, self._under_way = self._under_way, following
        if finish is not None:
            finish()
