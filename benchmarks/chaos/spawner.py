"""Spawner: starts the processes of a campaign through a zygote, and hurts them one by one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from examples.demo.processes import ROOT


class Child:
    """A process of the campaign. Its pid is never taken for another process's (pidfd)."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name, self.pid, self.log = name, pid, log
        self.is_stopped = False
        self._fd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._fd = os.pidfd_open(pid)

    @property
    def is_alive(self) -> bool:
        """True if it has not ended; a stopped process is alive."""
        return self._fd is not None and not select.select([self._fd], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it and to the processes that it has started."""
        if self._fd is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)  # it may lead no group yet
                os.killpg(self.pid, number)

    def stop(self) -> None:
        """Stops it where it is: it keeps its connections and locks, and answers nothing."""
        self.is_stopped = True
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.is_stopped = False
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it and waits until it is gone."""
        self.send(signal.SIGKILL)
        if self._fd is not None:
            select.select([self._fd], [], [], 10)
            os.close(self._fd)
            self._fd = None

    @property
    def num_threads(self) -> int:
        return len(self._listed("task"))

    @property
    def num_fds(self) -> int:
        return len(self._listed("fd"))

    @property
    def peak_bytes(self) -> int:
        """The most memory that it ever had."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def _listed(self, folder: str) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/{folder}")
        except OSError:
            return []


class Spawner:
    """A zygote and its children, which all end with it.

    model: the checkpoint that the instances serve.
    engine: the name of the engine that they run.
    """

    def __init__(self, scratch: Path, model: Path, engine: str) -> None:
        self._logs = scratch / "logs"
        self._logs.mkdir(exist_ok=True)
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos.zygote", str(model), engine],
            cwd=ROOT,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._orders, self._answers = self._zygote.stdin, self._zygote.stdout
        if self._answers.readline() != "ready\n":
            raise RuntimeError("the zygote did not start")

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        clock: tuple[Path, int] | None = None,
    ) -> Child:
        """Starts a process; processes of one name share a log."""
        log = self._logs / f"{name}.log"
        order = {
            "argv": list(argv),
            "env": dict(env or {}),
            "log": str(log),
            "clock": None if clock is None else [str(clock[0]), clock[1]],
        }
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        return Child(name, int(self._answers.readline()), log)

    def close(self) -> None:
        self._orders.close()
        self._answers.close()
        self._zygote.wait(30)


@contextlib.contextmanager
def open_spawner(scratch: Path, model: Path, engine: str = "mini") -> Iterator[Spawner]:
    spawner = Spawner(scratch, model, engine)
    try:
        yield spawner
    finally:
        spawner.close()
