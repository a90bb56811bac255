"""Pace: how long to wait before a store is asked for markers again."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Pauses briefly after news and then ever longer, and keeps within a rate of calls.

    first_s, last_s: the shortest and the longest pause.
    growth: of a pause over the one before.
    calls_per_s: the most calls on average; None for a store that costs no round trip.
    burst: calls that may come faster before the average counts.
    share: of so many seconds one at most is spent in calls of the store.
    """

    def __init__(
        self,
        first_s: float = 0.002,
        last_s: float = 0.020,
        calls_per_s: float | None = 200.0,
        burst: int = 20,
        share: int = 4,
        growth: float = 1.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._last_s, self._clock = first_s, last_s, clock
        self._share, self._growth = share, growth
        self._call_s = 1.0 / calls_per_s if calls_per_s else 0.0
        self._burst_s = burst * self._call_s
        self._pause_s = first_s
        self._paid_until = 0.0
        self._rested_at = 0.0

    def hurry(self) -> None:
        """Makes the next pause the shortest: there is news."""
        self._pause_s = self._first_s

    def blocked_s(self) -> float:
        """Seconds during which the store must not be asked, whatever the news."""
        at = max(self._rested_at, self._paid_until - self._burst_s)
        return max(0.0, at - self._clock())

    def after(self, num_calls: int, took_s: float) -> float:
        """Returns the pause after so many calls of the store, which took so many seconds."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + num_calls * self._call_s
        self._rested_at = now + (self._share - 1) * took_s
        pause, self._pause_s = self._pause_s, min(self._pause_s * self._growth, self._last_s)
        return max(pause, self.blocked_s())
