"""Countdown: one call after the last of several jobs has ended."""

from __future__ import annotations

from collections.abc import Callable

from pdstore.worker.job import Job


class Countdown:
    """Calls a function once `count` has been called n times; at once for n = 0.

    Any thread or signal handler may call `count`: it takes no lock.
    """

    def __init__(self, n: int, function: Callable[[], None]) -> None:
        self._left = list(range(n))
        self._function = function
        if n == 0:
            function()

    def count(self, job: Job) -> None:
        if self._left.pop() == 0:  # `pop` is atomic: exactly one call gets the 0
            self._function()
