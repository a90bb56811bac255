"""Child processes of tests: they react to signals, and none outlives its test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def child(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process in a group of its own, and kills the group at the end.

    options: of subprocess.Popen. Leaving also closes the pipes and waits for the process.
    """
    with default_signals():
        process = subprocess.Popen(command, start_new_session=True, **options)
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Starts children in here with the default reaction to signals.

    A script's job in the background ignores SIGINT, `nohup` SIGHUP; children would inherit that.
    """
    ignored = [number for number in _STOPPING if signal.getsignal(number) is signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
