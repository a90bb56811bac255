"""The pool P and D meet in: a fresh directory, redis-server or Mooncake, or the user's own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator

from examples.demo.mooncake_pool import start_mooncake
from examples.demo.processes import DemoError, Processes, free_ports

KINDS = ("file", "redis", "mooncake")

_PING_S = 0.5


@contextlib.contextmanager
def open_pool(store: str, processes: Processes) -> Iterator[str]:
    """The URL of the pool. What is made for it goes away after the children have been stopped."""
    if store not in KINDS:
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="pdstore-demo-", ignore_cleanup_errors=True) as scratch:
        if store == "file":
            yield f"file://{scratch}"
        elif store == "redis":
            yield _start_redis(scratch, processes)
        else:
            yield start_mooncake(processes)


def _start_redis(scratch: str, processes: Processes) -> str:
    program = shutil.which("redis-server")
    if program is None:
        raise DemoError(
            "redis-server is not installed. As root: apt-get install redis-server\n"
            "Or name one that runs: --store redis://HOST:PORT"
        )
    (port,) = free_ports(1)
    command = f"{program} --bind 127.0.0.1 --port {port} --dir {scratch} --appendonly no".split()
    limits = ["--save", "", "--maxmemory", "1gb", "--maxmemory-policy", "noeviction"]
    processes.start("store", [*command, *limits], lambda: _answers_ping(port))
    return f"redis://127.0.0.1:{port}/0"


def _answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), _PING_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
