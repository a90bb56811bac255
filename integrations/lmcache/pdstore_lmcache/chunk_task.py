"""ChunkTask: one of LMCache's calls, in shares that several workers run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdstore.errors import JobDeadline, Reason, reason_of
from pdstore.threads import Deadline


@dataclass(frozen=True)
class Ended:
    """The end of a task.

    done: for each chunk, True if it is found, loaded or stored.
    reason: why not all are; None if they are, or if the missing ones were never stored.
    """

    done: tuple[bool, ...]
    reason: Reason | None = None
    error: Exception | None = None


class ChunkTask:
    """Some chunks on their way; it ends exactly once, at the latest at its deadline.

    After its end nothing of it reads or writes LMCache's memory.

    ended: is called once, by the thread that ends it.
    """

    def __init__(
        self,
        num_chunks: int,
        num_shares: int,
        timeout_s: float,
        ended: Callable[[Ended], None],
    ) -> None:
        self.deadline = Deadline(timeout_s)
        self._done = [False] * num_chunks
        self._left = num_shares
        self._ended = ended
        self._changed = threading.Condition()
        self._num_copying = 0
        self._is_over = False
        self._why: tuple[Reason | None, Exception | None] = None, None

    @property
    def is_over(self) -> bool:
        return self._is_over

    @contextlib.contextmanager
    def copying(self) -> Iterator[bool]:
        """Keeps the task from its end, for a copy from or to LMCache's memory.

        Yields False if it has ended already: then nothing may be copied.
        """
        with self._changed:
            may_copy = not self._is_over
            self._num_copying += may_copy
        try:
            yield may_copy
        finally:
            with self._changed:
                self._num_copying -= may_copy
                self._changed.notify_all()

    def set_done(self, number: int) -> None:
        """Says that one chunk is found, loaded or stored."""
        self._done[number] = True

    def share_ended(self, reason: Reason | None = None, error: Exception | None = None) -> None:
        """Says that one share has ended; the last one ends the task."""
        with self._changed:
            self._left -= 1
            if self._why[0] is None:
                self._why = reason, error
            is_last = self._left == 0
        if is_last:
            self.end(*self._why)

    def end(self, reason: Reason | None, error: Exception | None = None) -> None:
        """Ends it with what is done by now, when no copy is under way. Twice is fine."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._changed.wait_for(lambda: self._num_copying == 0)
            done = tuple(self._done)
        self._ended(Ended(done, None if all(done) else reason, error))

    def end_if_late(self) -> bool:
        """Ends it if its time is up; True if it is over."""
        if not self._is_over and self.deadline.is_over():
            error = JobDeadline(f"{len(self._done)} chunks were not done in time")
            self.end(reason_of(error), error)
        return self._is_over
