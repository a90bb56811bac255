"""Another thread at every moment: a function interrupted before its lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def acts_at_line(
    function: Callable[[], object],
    number: int,
    act: Callable[[], object],
    within: str = "/pdstore/worker/",
    is_locked: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs `function`, and `act` before its line of that number. False if it has fewer lines.

    What `act` does stands for another thread that runs while this one is held up there.

    within: of the path of the files whose lines count.
    is_locked: true while `act` would wait for a lock of this thread's: those lines do not count,
      because the other thread goes on behind them.
    """
    left, before = number, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal left
        if within not in frame.f_code.co_filename:
            return None
        if event == "line" and left >= 0 and not is_locked():
            left -= 1
            if left < 0:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return left < 0
