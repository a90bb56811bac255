"""Threads for tests, with a deadline and with their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def run_together(*functions: Callable[[], None], deadline_s: float = 30.0) -> None:
    """Runs functions at once; raises the first error, AssertionError for one that does not end."""
    start_background(*functions)(deadline_s)


def start_background(*functions: Callable[[], None]) -> Callable[[float], None]:
    """Starts functions at once. The result waits for their end as `run_together` does."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(f,), daemon=True)  # noqa: TID251 - no torch here
        for f in functions
    ]
    for thread in threads:
        thread.start()

    def join(deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if errors:
            raise errors[0]
        alive = sum(thread.is_alive() for thread in threads)
        assert not alive, f"{alive} of {len(threads)} still run after {deadline_s} s"

    return join
