"""Signal handlers at every moment: a function interrupted before each of its lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def ends_though_interrupted(
    function: Callable[[], object], handler: Callable[[], object], timeout_s: float = 10.0
) -> bool:
    """Runs `function`, and `handler` on the same thread before each line. False if that hangs.

    A signal's handler interrupts its thread anywhere, while the thread holds what it holds. Lines
    of the functions that `function` calls count too; those of the handler do not.
    """
    in_handler = False

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal in_handler
        if event == "line" and not in_handler:
            in_handler = True
            handler()
            in_handler = False
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
