"""IdleWorkers: the workers that wait, of which as many are woken as there is work for."""

from __future__ import annotations

import threading

from pdstore.outcome import Direction

LOADS_ONLY, SAVES_ONLY = 0, 1
"""The workers that are kept for one direction, by number. The others serve both."""


def serves(worker: int, direction: Direction) -> bool:
    """True if a worker may take jobs of a direction."""
    return worker != (SAVES_ONLY if direction is Direction.LOAD else LOADS_ONLY)


class IdleWorkers:
    """Workers that have found nothing to do. The queue's lock guards it.

    A worker that wakes takes Python's lock from the engine, so it is woken for work and not to see
    whether there is any. It leaves the list when it is woken: a second call wakes another one.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: dict[int, threading.Condition] = {}  # in the order in which they came

    def wait(self, worker: int) -> None:
        """Gives the lock up until the worker is woken, and takes it again."""
        self._waiting[worker] = called = threading.Condition(self._lock)
        called.wait()

    def wake(self, direction: Direction, most: int) -> None:
        """Wakes up to `most` workers that serve a direction; those that waited least come first.

        The worker that is kept for the direction comes before all, because it has nothing else.
        """
        suitable = [worker for worker in reversed(list(self._waiting)) if serves(worker, direction)]
        suitable.sort(key=lambda worker: worker > SAVES_ONLY)
        for worker in suitable[:most]:
            self._call(worker)

    def wake_all(self) -> None:
        """Wakes every worker: the queue is closed."""
        for worker in list(self._waiting):
            self._call(worker)

    def _call(self, worker: int) -> None:
        called = self._waiting.pop(worker, None)
        if called is not None:  # no signal handler has been here since the list was made
            called.notify()
