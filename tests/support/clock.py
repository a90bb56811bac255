"""Clock: a clock that tests move by hand."""

from __future__ import annotations


class Clock:
    """A callable like `time.monotonic`: returns `now`, and moves it on by `step`."""

    def __init__(self, now: float = 100.0, step: float = 0.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
