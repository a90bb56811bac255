"""Hosts that are network namespaces of this machine, joined by a cable; their making needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child import child

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "nsenter", "ss", "unshare")
_TIMEOUT_S = 120.0


def can_make_hosts() -> bool:
    """Returns whether this process may make network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        return False
    return subprocess.run(["unshare", "--net", "--mount", "true"]).returncode == 0


needs_hosts = pytest.mark.skipif(
    not can_make_hosts(), reason="needs root and Debian's package iproute2: network namespaces"
)


class Host:
    """One host, whose shell commands run in an environment of their own.

    names: the text of its /etc/hosts.
    """

    def __init__(self, stack: contextlib.ExitStack, directory: Path, name: str, names: str) -> None:
        self._stack, self._logs = stack, directory / name
        self._logs.mkdir()
        file = self._logs / "hosts"
        file.write_text(names)
        script = f"mount --bind {file} /etc/hosts && ip link set lo up && echo && exec sleep inf"
        command = ["unshare", "--net", "--mount", "sh", "-c", script]
        self._holder = stack.enter_context(child(command, stdout=subprocess.PIPE))
        assert self._holder.stdout
        assert self._holder.stdout.readline() == b"\n"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.exports: list[str] = []
        """Lines that each later command of this host runs after."""

    @property
    def pid(self) -> int:
        return self._holder.pid

    def _command(self, line: str) -> list[str]:
        script = "\n".join([f"cd {self._logs}", *self.exports, line])
        return [
            "nsenter",
            f"--target={self.pid}",
            "--net",
            "--mount",
            "--root",
            "bash",
            "-c",
            script,
        ]

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            self._command(line), env=self._env, capture_output=True, text=True, timeout=_TIMEOUT_S
        )

    def start(self, name: str, line: str) -> None:
        """Starts a command that goes on; what it prints is its log."""
        output = self._stack.enter_context((self._logs / f"{name}.log").open("wb"))
        options = {"env": self._env, "stdout": output, "stderr": subprocess.STDOUT}
        self._stack.enter_context(child(self._command(line), **options))

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()

    def ports_between(self) -> set[int]:
        """Returns the ports that listen, of the connections between this host and the other."""
        rows = [row.split() for row in self.run("ss -Htna").stdout.splitlines()]
        listening = {row[3].rpartition(":")[2] for row in rows if row[0] == "LISTEN"}
        found = set()
        for _, _, _, here, there, *_ in (row for row in rows if row[0] != "LISTEN"):
            (ip, port), (peer, peer_port) = (x.rpartition(":")[::2] for x in (here, there))
            if ip != peer:
                found.add(int(port if port in listening else peer_port))
        return found


@contextlib.contextmanager
def two_hosts(directory: Path, *names: str) -> Iterator[tuple[Host, Host]]:
    """Makes two hosts. names: of the first and of the second, each separated by blanks."""
    text = f"127.0.0.1 localhost\n10.77.0.1 {names[0]}\n10.77.0.2 {names[1]}\n"
    with contextlib.ExitStack() as stack:
        first, second = (Host(stack, directory, name, text) for name in ("first", "second"))
        cable = f"ip link add cable type veth peer name cable netns {second.pid}"
        assert first.run(cable).returncode == 0
        for number, host in enumerate((first, second), 1):
            done = host.run(f"ip addr add 10.77.0.{number}/24 dev cable && ip link set cable up")
            assert done.returncode == 0, done.stderr
        yield first, second
