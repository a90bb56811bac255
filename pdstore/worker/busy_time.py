"""BusyTime: how long anybody was at work, of several who work at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class BusyTime:
    """Adds up the time in which at least one thread is inside its `with`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_inside = 0
        self._since = self._total_s = 0.0

    @property
    def seconds(self) -> float:
        """The time so far, without that of threads that are still inside. Takes no lock."""
        return self._total_s

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._since = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._total_s += self._clock() - self._since
