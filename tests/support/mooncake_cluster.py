"""A real Mooncake for tests: a master, a holder of memory, and ways to hurt them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdstore.environment import set_missing_variables
from pdstore.errors import StoreError
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.mooncake.store import MooncakeStore
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put
from tests.support.kv import eventually

LEASE_S, CLIENT_TTL_S, DISCARD_S = 3.0, 4, 3
RPC_S = 1.0  # the library reads its time-outs once per process: shorter ones than in production
SEGMENT = 256 << 20
set_missing_variables(
    {
        "MC_RPC_TIMEOUT_MS": str(int(RPC_S * 1000)),
        "MC_TCP_STATUS_TIMEOUT_SEC": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    }
)
_INSTALL = "pip install 'pdstore[mooncake-cpu]'; as root: scripts/system_packages.sh mooncake"
_libc = ctypes.CDLL(None)


def need_mooncake() -> None:
    """Fails, with what to install, where Mooncake's library or its programs are missing."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.fail(f"the mooncake tests need Mooncake ({error}): {_INSTALL}", pytrace=False)


class Cluster:
    """A master and, unless told otherwise, one process that holds memory for it.

    directory: for logs. flags: more of the master's.
    """

    def __init__(
        self, directory: Path, *, segment: int = SEGMENT, flags: Sequence[str] = ()
    ) -> None:
        need_mooncake()
        self._directory, self._segment, self._flags = directory, segment, tuple(flags)
        self.port, self.metrics_port, self.holder_port = free_ports(3)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master = self.start_master()
        self.holder: subprocess.Popen[bytes] | None = None
        if segment:
            self.start_holder()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?lease={LEASE_S}&discard={DISCARD_S}"

    @property
    def shared_url(self) -> str:
        return f"{self.url}&topology=shared&client=127.0.0.1:{self.holder_port}"

    def start_master(self) -> subprocess.Popen[bytes]:
        """Starts a master, an empty one if there was one before; at the same port."""
        self.master = self._start(
            "mooncake_master",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            "--metrics_host=127.0.0.1",
            f"--default_kv_lease_ttl={int(LEASE_S * 1000)}",
            f"--client_ttl={CLIENT_TTL_S}",
            f"--put_start_discard_timeout_sec={DISCARD_S}",
            *self._flags,
        )
        self._wait_for_port(self.port)
        return self.master

    def start_holder(self) -> subprocess.Popen[bytes]:
        """Starts a process that lends memory; returns when the pool takes values."""
        self.holder = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={self.holder_port}",
            f"--global_segment_size={self._segment}",
            f"--master_server_address=127.0.0.1:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        )
        self._wait_for_port(self.holder_port)
        return self.holder

    def connect(self, url: str | None = None) -> MooncakeStore:
        return open_store(url or self.url, Settings())

    def open(self, url: str | None = None) -> contextlib.closing[MooncakeStore]:
        return contextlib.closing(self.connect(url))

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._directory / f"{program}.{len(self._processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [Path(sys.executable).parent / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
                preexec_fn=lambda: _libc.prctl(1, signal.SIGKILL),  # dies with the tests
            )
        self._processes.append(process)
        return process

    def _wait_for_port(self, port: int) -> None:
        eventually(lambda: _accepts(port))


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process hangs in here: SIGSTOP, then SIGCONT."""
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: _states_of(process.pid) == {"T"})
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def wait_until_it_serves(store: MooncakeStore, timeout_s: float = 15.0) -> None:
    """Returns when a value can be put and read: after a start, or when a fault is over."""

    def serves() -> bool:
        keys = fresh_keys(1)
        try:
            return put(store, keys, [b"x"]) == 1 and get(store, keys, [1]) == [b"x"]
        except StoreError:
            return False
        finally:
            time.sleep(0.02)

    eventually(serves, timeout_s)


def half_write(store: MooncakeStore, keys: Sequence[str], size: int) -> None:
    """What a writer leaves that dies in the middle of a put."""
    with store._data.call() as raw:
        assert raw.batch_put_session_start(list(keys), [size] * len(keys)) == [0] * len(keys)


def unique(name: str) -> str:
    return f"{name}-{secrets.token_hex(4)}"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    time.sleep(0.01)
    return False


def _states_of(pid: int) -> set[str]:
    """What the threads of a process do, as in ps(1)."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return {stat.rpartition(") ")[2][0] for stat in stats}
