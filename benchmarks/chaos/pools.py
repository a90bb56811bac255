"""Pools: the stores of a campaign, each with its servers, its links and what can happen to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import httpx

from benchmarks.chaos.disk import Disk
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.spawner import Child, Spawner
from examples.ports import free_ports
from pdstore.errors import StoreFull
from pdstore.format.keys import POOL_ID_KEY, PURGE_PREFIX
from pdstore.settings import read_settings
from pdstore.store import Store, open_store
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import fresh_keys, put

_START_S = 20.0
_FILLERS = 24  # keys of 1 MiB: more than its memory
_QUICK_MOONCAKE = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
}


_CREW = min(15, max(1, (os.cpu_count() or 1) // 2))
"""Threads that the native library starts with the first share of several values."""


def _stays(key: str) -> bool:
    """True for keys that no purge removes: the pool's id, and the numbers of purges."""
    return key == POOL_ID_KEY or key.startswith(PURGE_PREFIX)


class Pool(ABC):
    """A store, and the processes and links that it consists of.

    servers: its processes, by name; a fault may stop or kill them.
    links: proxies between an instance and a server.
    env: what the instances need to use it.
    is_slow: recovering takes seconds.
    hold_files: files that make one of its parts hang while they exist, by the part's name.
    memory_servers: servers whose memory a fault may fill or empty.
    late_threads, late_fds: how many threads the store's library starts, and file descriptors it
      opens, only when it needs them.
    """

    kind: ClassVar[str]
    is_slow: ClassVar[bool] = False
    late_threads: ClassVar[int] = 0
    late_fds: ClassVar[int] = 0

    def __init__(self, spawner: Spawner, disk: Disk, seed: str) -> None:
        self._spawner, self.disk, self._seed = spawner, disk, seed
        self.servers: dict[str, Child] = {}
        self.links: dict[str, Proxy] = {}
        self.env: dict[str, str] = {}
        self.hold_files: dict[str, Path] = {}
        self.memory_servers: list[str] = []

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for the driver, without a proxy."""

    def url_for(self, role: str) -> str:
        """Returns the URL for P or D."""
        return self.url

    @property
    def has_disk(self) -> bool:
        """True if its values lie on the small disk."""
        return False

    async def open(self) -> None:  # noqa: B027 - some have neither servers nor links
        """Starts its servers and links."""

    def restart(self, name: str) -> None:  # noqa: B027
        """Starts a server that was killed."""

    can_vanish: ClassVar[bool] = False

    def vanish(self) -> bool:
        """Deletes the directory of its values. Returns False if it has none, or could not."""
        return False

    async def order(self, name: str, command: str) -> bool:
        """Gives a server with memory a command: `fill`, `drain` or `empty`. False if it fails."""
        return False

    async def heal(self) -> None:
        """Ends all that faults have done to it, except to its processes and links."""
        self.disk.empty()
        for name in self.memory_servers:
            await self.order(name, "drain")
        for file in self.hold_files.values():
            file.unlink(missing_ok=True)

    def leave_below(self) -> bool:
        """Removes all blocks from the first of several tiers. False if it has not several."""
        return False

    def purge_again(self) -> None:  # noqa: B027
        """Purges what the pages say must be purged after the faults, so that blocks are copied."""

    async def leftovers(self, num_stores: int) -> list[str]:
        """Returns what is left although the pool was cleared, in words.

        A purge's numbers and the pool's id stay.
        num_stores: stores that the instances have open.
        """
        return []

    def open_store(self) -> Store:
        return open_store(self.url, read_settings())

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        for server in self.servers.values():
            server.kill()


class FilePool(Pool):
    """Files on the small disk, with a budget that evicts."""

    kind = "file"
    late_threads = _CREW
    can_vanish = True

    @property
    def url(self) -> str:
        return f"file://{self._root}?budget=4MiB&lease=1"

    @property
    def has_disk(self) -> bool:
        return self.disk.is_small

    @property
    def _root(self) -> Path:
        return self.disk.path / "pool"

    def vanish(self) -> bool:
        with contextlib.suppress(OSError):  # an instance makes it again meanwhile
            shutil.rmtree(self._root)
        return True

    async def leftovers(self, num_stores: int) -> list[str]:
        values = [path for path in self._root.glob("??/*") if not _stays(path.name)]
        for path in (self._root / "tmp").glob("*"):
            if not Path(f"/proc/{path.name.partition('-')[0]}").exists():
                os.utime(path, (0, 0))  # its writer was killed: the pool deletes it when it is old
        self.open_store().close()
        left = (self._root / "tmp").glob("*")
        found = [f"value {path.name}" for path in values]
        found += [f"temporary file {path}" for path in left]
        found += [f"pipe {path.name}" for path in (self._root / "bells").glob("*")]
        return found


class ArenaPool(Pool):
    """Shared memory on the small disk."""

    kind = "arena"
    late_threads = _CREW
    size: ClassVar[str] = "8MiB"

    @property
    def url(self) -> str:
        return f"shm://chaos?size={self.size}&lease=1&dir={self.disk.path}"

    @property
    def has_disk(self) -> bool:
        return self.disk.is_small

    async def leftovers(self, num_stores: int) -> list[str]:
        store = self.open_store()
        assert isinstance(store, ArenaStore)
        with contextlib.closing(store):
            await asyncio.to_thread(_need_room, store)
            counts = store.counts()
            values = [value.key for value in store.stored_values() if not _stays(value.key)]
        found = [f"{len(values)} values"] if values else []
        return found + ([f"{counts.reserved} reserved slots"] if counts.reserved else [])


class RedisPool(Pool):
    """A redis-server, with a proxy to it for each instance."""

    kind = "redis"

    def __init__(self, spawner: Spawner, disk: Disk, seed: str) -> None:
        super().__init__(spawner, disk, seed)
        (self._port,) = free_ports(1)
        self.memory_servers = ["redis"]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0?timeout=1"

    def url_for(self, role: str) -> str:
        return f"redis://127.0.0.1:{self.links[f'{role}-store'].port}/0?timeout=1"

    async def open(self) -> None:
        for role in ("prefill", "decode"):
            link = self.links[f"{role}-store"] = Proxy(role, self._port, f"{self._seed}{role}")
            await link.open()
        self.restart("redis")
        await wait_for_port(self._port)

    def restart(self, name: str) -> None:
        options = f"--bind 127.0.0.1 --port {self._port} --appendonly no --maxmemory 16mb".split()
        command = ["redis-server", *options, "--save", "", "--maxmemory-policy", "volatile-lru"]
        self.servers["redis"] = self._spawner.spawn("redis", command)

    async def order(self, name: str, command: str) -> bool:
        try:
            return await asyncio.to_thread(self._order, command)
        except (OSError, ValueError):  # another fault has killed or stopped it
            return False

    def _order(self, command: str) -> bool:
        """Fills it with keys that are not evicted, deletes these, or deletes all keys."""
        with socket.create_connection(("127.0.0.1", self._port), 1.0) as connection:
            answers = connection.makefile("rb")

            def ask(text: str) -> bool:
                connection.sendall(f"{text}\r\n".encode())
                return answers.readline().startswith((b"+", b":"))

            if command == "empty":
                return ask("FLUSHALL")
            if command == "drain":
                return ask(f"DEL {' '.join(f'filler-{n}' for n in range(_FILLERS))}")
            size = 1 << 20
            fills = [ask(f"SETRANGE filler-{n} {size} x") for n in range(_FILLERS)]
            return any(fills)  # the last ones are refused

    async def leftovers(self, num_stores: int) -> list[str]:
        with socket.create_connection(("127.0.0.1", self._port), 2.0) as connection:
            answers = connection.makefile("rb")
            connection.sendall(b"KEYS *\r\n")
            count = int(answers.readline()[1:])
            lines = [answers.readline().strip().decode() for _ in range(2 * count)]
        values = [key for key in lines[1::2] if not _stays(key)]
        return [f"{len(values)} keys"] if values else []


class MooncakePool(Pool):
    """A master and a holder; values go straight to the holder, the master is behind proxies.

    Two connections: with more of them, an audit would have to overlook what they open late.
    """

    kind = "mooncake"
    is_slow = True
    late_threads = 24  # of the second connection, and after calls of the master that failed
    late_fds = 32

    def __init__(self, spawner: Spawner, disk: Disk, seed: str) -> None:
        super().__init__(spawner, disk, seed)
        self._rpc, self._metrics, self._holder = free_ports(3)
        self.env = dict(_QUICK_MOONCAKE)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._rpc}?lease=3&connections=2"

    def url_for(self, role: str) -> str:
        return f"mooncake://127.0.0.1:{self.links[f'{role}-store'].port}?lease=3&connections=2"

    async def open(self) -> None:
        for role in ("prefill", "decode"):
            link = self.links[f"{role}-store"] = Proxy(role, self._rpc, f"{self._seed}{role}")
            await link.open()
        for name, port in (("master", self._rpc), ("holder", self._holder)):
            self.restart(name)
            await wait_for_port(port)

    def restart(self, name: str) -> None:
        commands = {"master": self._master, "holder": self._lender}
        self.servers[name] = self._spawner.spawn(name, commands[name](), _QUICK_MOONCAKE)

    async def leftovers(self, num_stores: int) -> list[str]:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{self._metrics}/metrics")).text
        lines = (line.split() for line in text.splitlines() if line.startswith("master_key_count"))
        count = sum(float(line[-1]) for line in lines)
        return [f"{count:.0f} keys"] if count > 1 else []

    def _master(self) -> Sequence[str]:
        return [
            *(_program("mooncake_master"), f"--rpc_port={self._rpc}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={self._metrics}", "--metrics_host=127.0.0.1"),
            *("--default_kv_lease_ttl=3000", "--client_ttl=4"),
            *("--put_start_discard_timeout_sec=3", "--put_start_release_timeout_sec=4"),
        ]

    def _lender(self) -> Sequence[str]:
        return [
            *(_program("mooncake_client"), "--host=127.0.0.1", f"--port={self._holder}"),
            *("--global_segment_size=64MB", f"--master_server_address=127.0.0.1:{self._rpc}"),
            *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp"),
        ]


def _need_room(store: ArenaStore) -> None:
    """Fills an arena for a moment: only for want of room does it free what dead processes hold."""
    size = 1 << 16
    keys = fresh_keys(2 * len(store.memory()) // size)
    for key in keys:
        with contextlib.suppress(StoreFull):
            put(store, [key], [bytes(size)])
    store.remove(keys)


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


async def wait_for_port(port: int) -> None:
    """Returns when a process listens on the port. Raises TimeoutError."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"nothing listens on port {port} after {_START_S:g} s")


POOLS: dict[str, type[Pool]] = {
    pool.kind: pool for pool in (FilePool, RedisPool, ArenaPool, MooncakePool)
}
