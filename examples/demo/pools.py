"""The pool where P and D meet: a fresh directory, redis-server or Mooncake, or the user's own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from examples.demo.mooncake_pool import start_mooncake
from examples.demo.processes import DemoError, Processes
from examples.ports import free_ports
from pdstore.errors import ConfigError
from pdstore.store.url import StoreURL

KINDS = ("file", "redis", "mooncake")
MOONCAKE_VARIABLES = ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_MASTER_SERVER_ADDR")
"""Variables that name a Mooncake pool, for `serve` in examples/lib.sh too."""
_PING_S = 0.5


class Choice(NamedTuple):
    """A pool to test, and what chose it. store: one of KINDS, for a fresh one, or a URL."""

    store: str
    origin: str

    def __str__(self) -> str:
        """One line without a password. Raises DemoError for a text that is no URL."""
        if self.store in KINDS:
            return f"{self.store}, a fresh one ({self.origin})"
        try:
            return f"{StoreURL.of(self.store).label} ({self.origin})"
        except ConfigError as error:
            raise DemoError(
                f"{self.origin}: {error}; file, redis or mooncake is a fresh pool"
            ) from error


def choose(given: str | None, variables: Mapping[str, str]) -> Choice:
    """Chooses by `--store`, else by PDSTORE_STORE, else by Mooncake's variables, else files."""
    if given:
        return Choice(given, "--store")
    if variables.get("PDSTORE_STORE"):
        return Choice(variables["PDSTORE_STORE"], "PDSTORE_STORE")
    for name in MOONCAKE_VARIABLES:
        if variables.get(name):
            return Choice("mooncake://", f"{name}={variables[name]}")
    return Choice("file", "neither --store nor PDSTORE_STORE")


@contextlib.contextmanager
def open_pool(store: str, processes: Processes) -> Iterator[str]:
    """Yields the URL of the pool. A fresh pool is removed after the children have been stopped."""
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
    processes.start("store", [*command, *limits], lambda: answers_ping(port))
    return f"redis://127.0.0.1:{port}/0"


def answers_ping(port: int) -> bool:
    """True if a redis on this host answers PING."""
    try:
        with socket.create_connection(("127.0.0.1", port), _PING_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
