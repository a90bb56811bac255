"""TaskResults: results that wait for LMCache to fetch them."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Notifier(Protocol):
    """LMCache's EventNotifier: makes a file descriptor readable."""

    def fileno(self) -> int: ...
    def notify(self) -> None: ...
    def close(self) -> None: ...


class TaskResults(Generic[T]):
    """The results of one kind of task, by the task's number. Any thread may call it.

    notifier: tells LMCache of each result; it is closed with this.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._is_closed = False

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable with a result."""
        return self._notifier.fileno()

    def add(self, number: int, result: T) -> None:
        """Keeps a result until it is fetched; after `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._results[number] = result
            self._notifier.notify()

    def pop(self, number: int) -> T | None:
        """Returns a result, once; None while there is none."""
        with self._lock:
            return self._results.pop(number, None)

    def pop_all(self) -> dict[int, T]:
        """Returns all results that were not fetched."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Closes the descriptor. Twice is fine."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()
