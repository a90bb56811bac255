"""A real Mooncake for tests: a master, a holder of memory, and ways to hurt them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from examples.ports import free_ports
from pdstore.environment import set_missing_variables
from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.native.library import address_of
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.mooncake.batches import SLAB_BYTES
from pdstore.store.mooncake.library import Library, MooncakeConfig, Raw
from pdstore.store.mooncake.store import MooncakeStore
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put
from tests.support.kv import eventually

LEASE_S, CLIENT_TTL_S, DISCARD_S = 3.0, 4, 3
RPC_S = 3.0  # as in production: on a busy host a healthy master may be late by more than a second
SEGMENT = 256 << 20
set_missing_variables(  # the library reads its timeouts once per process
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
    """A master and one process that holds memory for it.

    directory: for logs.
    segment: bytes that the process holds; 0: there is none.
    flags: further flags of the master.
    """

    def __init__(
        self, directory: Path, *, segment: int = SEGMENT, flags: Sequence[str] = ()
    ) -> None:
        need_mooncake()
        self._directory, self._segment, self._flags = directory, segment, tuple(flags)
        self.port, self.metrics_port, self.holder_port = free_ports(3)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start_master()
        if segment:
            self.start_holder()

    @property
    def url(self) -> str:
        http = f"metrics_port={self.metrics_port}"
        return f"mooncake://127.0.0.1:{self.port}?lease={LEASE_S}&{http}"

    def start_master(self) -> None:
        """Starts a master, always at the same port and always empty."""
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
        eventually(lambda: _accepts(self.port))

    def start_holder(self) -> None:
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
        eventually(lambda: _accepts(self.holder_port))

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


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stops the process with SIGSTOP, and lets it continue at the end."""
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
    """Returns when a value can be put and read, after a start or a fault."""

    def serves() -> bool:
        keys = fresh_keys(1)
        try:
            return put(store, keys, [b"x"]) == 1 and get(store, keys, [1]) == [b"x"]
        except StoreError:
            return False
        finally:
            time.sleep(0.02)

    eventually(serves, timeout_s)


def master_of(store: MooncakeStore) -> AbstractContextManager[Raw]:
    """Lends the library's object that talks to the master, for a call without the store's rules."""
    return store.connections[0].call()


def mover_of(store: MooncakeStore) -> AbstractContextManager[Raw]:
    """Lends the library's object that moves values."""
    return store.connections[1].call()


def size_of(store: MooncakeStore, key: BlockKey) -> int:
    """Returns the size of a stored value, or the code that says why there is none."""
    with master_of(store) as raw:
        return raw.get_size(key)


def put_bare(
    store: MooncakeStore, keys: Sequence[BlockKey], slots: Slots, *, is_pinned: bool = False
) -> None:
    """Puts values from slots of any memory, without a look afterwards and so without a lease."""
    view = store.allocate(max(len(slots.view), SLAB_BYTES))
    view[: len(slots.view)] = slots.view
    addresses = [address_of(view) + number * slots.slot_bytes for number in slots.numbers]
    config = Library(MooncakeConfig(master="127.0.0.1:1")).put_config(is_pinned=is_pinned)
    with mover_of(store) as raw:
        codes = raw.batch_put_from(list(keys), addresses, list(slots.sizes), config)
    assert codes == [0] * len(keys)


def half_write(store: MooncakeStore, keys: Sequence[str], size: int) -> None:
    """Leaves keys as a writer does that dies in the middle of a put."""
    with mover_of(store) as raw:
        assert raw.batch_put_session_start(list(keys), [size] * len(keys)) == [0] * len(keys)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    time.sleep(0.01)
    return False


def _states_of(pid: int) -> set[str]:
    """Returns the states of a process's threads, as in ps(1), but of those that end meanwhile."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(") ")[2][0])
    return states
