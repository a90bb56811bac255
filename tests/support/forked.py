"""A forked child that runs one function and is ended if it hangs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable


def exit_code_of(function: Callable[[], object], timeout_s: float = 10.0) -> int | str:
    """Returns 0 if `function` was true in the child, 1 if not, "hangs" after the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads run here, as in an engine
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"
