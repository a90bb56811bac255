"""The processes of the demo: each has a log file, and none outlives the demo."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "logs"

_POLL_S = 0.05
_STOP_S = 10.0
_LOG_TAIL_LINES = 20
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class DemoError(Exception):
    """Raised where the demo cannot go on; the message is for the user."""


@dataclass(frozen=True)
class Process:
    """A child of the demo, the leader of its own process group."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    is_ready: Callable[[], bool]

    def tail(self) -> str:
        """Returns the end of its log under the log's name."""
        return tail_of(self.log)


class Processes:
    """Starts children, waits until they serve, and stops them at exit whatever happened.

    If the demo itself is killed, the kernel kills the children (on Linux).

    running: the children that have not been stopped.
    """

    def __init__(self) -> None:
        self.running: list[Process] = []
        self._before_exec = _dies_with_parent() if sys.platform == "linux" else None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            self.stop(*self.running)

    def start(
        self,
        name: str,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        log_name: str | None = None,
    ) -> Process:
        """Starts a command in the repository's root; its output goes to logs/NAME.log."""
        LOGS.mkdir(exist_ok=True)
        log = LOGS / f"{log_name or name}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=env,
                start_new_session=True,
                preexec_fn=self._before_exec,  # safe: the demo has no threads
            )
        process = Process(name, popen, log, is_ready)
        self.running.append(process)
        return process

    def wait_ready(self, deadline_s: float, show: Callable[[str], None]) -> None:
        """Waits until every running child is ready. Raises DemoError with the end of a log."""
        begin = time.monotonic()
        waiting = list(self.running)
        while waiting:
            passed = time.monotonic() - begin
            show(f"waiting for {', '.join(p.name for p in waiting)} ({passed:.0f} s)")
            self.check()
            waiting = [process for process in waiting if not process.is_ready()]
            if waiting and passed > deadline_s:
                late = waiting[0]
                raise DemoError(f"{late.name} is not ready after {passed:.0f} s\n{late.tail()}")
            time.sleep(_POLL_S if waiting else 0)

    def check(self) -> None:
        """Raises DemoError if a child has ended by itself."""
        for process in self.running:
            status = process.popen.poll()
            if status is not None:
                raise DemoError(f"{process.name} ended with status {status}\n{process.tail()}")

    def stop(self, *processes: Process) -> None:
        """Stops these children and their children: SIGTERM first, SIGKILL after some seconds."""
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.popen.wait()
        self.running = [process for process in self.running if process not in processes]

    def tails(self, *names: str) -> str:
        """Returns the ends of these running children's logs."""
        return "\n".join(process.tail() for process in self.running if process.name in names)


def tail_of(log: Path) -> str:
    """Returns the end of a log under its name."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"--- end of {log}:", *lines])


def stop_on_signals() -> None:
    """Makes SIGTERM and a closed terminal stop everything and end the demo, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # once is enough: everything is being stopped
        raise KeyboardInterrupt

    for each in _STOP_SIGNALS:
        signal.signal(each, interrupt)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores signals in here, so that stopping the children is never left half done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dies_with_parent() -> Callable[[], None]:
    """Returns a function for a child before exec: the kernel kills it when the demo ends."""
    libc = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask_the_kernel


def _signal_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, number)
