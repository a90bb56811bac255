"""MooncakeStore: blocks in a Mooncake pool, the store for many hosts."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pdstore.environment import mooncake_sources
from pdstore.errors import StoreTimeout, WrongLength
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.format.namespace import prefix_of
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.mooncake.barrier import Barrier
from pdstore.store.mooncake.batches import Batches, Lane
from pdstore.store.mooncake.client import Client, Raw
from pdstore.store.mooncake.closing import close_on_sigterm, close_together
from pdstore.store.mooncake.codes import INVALID, LEASE_OVER, MISSES, TRANSFER_FAILED, error_of
from pdstore.store.mooncake.config import MooncakeConfig
from pdstore.store.mooncake.library import Library, check_installed
from pdstore.store.mooncake.master_http import MasterHttp
from pdstore.store.mooncake.memory import Memory
from pdstore.store.mooncake.put import Putter
from pdstore.store.mooncake.server import Server
from pdstore.store.optional import ALL_KEYS, Room, StoredValue
from pdstore.store.url import StoreURL

log = logging.getLogger(__name__)

_WINDOWS = (32, 128, 512)
_SLOW_S = 0.8  # a transfer that fails after this long waited for a peer that hangs


class MooncakeStore(Store):
    """A store at `mooncake://master:50051?topology=holder`; `MooncakeConfig` lists the options.

    It has two connections, each made at its first use: one to the master alone, for `match` and
    `remove`, and one that moves values; more of the latter by `connections`, when they are needed.
    A value stays until the master evicts it, least recently leased first; the pool's own key is
    pinned.

    A value that is evicted, half-written, or in the memory of a process that died is a miss. A
    master that does not answer is StoreUnavailable or StoreTimeout; until it answers again, nothing
    calls the library, because each such call would hang for seconds. A call that the library gives
    up before its transfers are over returns only when they are (see `barrier`).

    library, server: Mooncake's library and the servers that it talks to; others are for tests.

    Raises MissingExtra when the library cannot be loaded.
    """

    def __init__(
        self,
        label: str,
        config: MooncakeConfig,
        library: Library | None = None,
        server: Callable[[str, str], Server] = Server,
    ) -> None:
        self.label = label
        self._config = config
        self._lifecycle = Lifecycle(label)
        self._library = library = library or Library(config)
        self._memory = Memory(library.allocator())
        self._http = MasterHttp(label, config.master_http)
        master = server(label, config.master)
        sharer = server(label, config.client) if config.topology == "shared" else None
        self._lookup = Client(label, master, library.connect_lookup)
        self._data = Client(label, sharer or master, self._connect_data)
        self._lanes = [Lane(self._data, Barrier(label, self._data, self._memory, sharer))]
        for _ in range(1, config.connections):
            more = Client(label, master, partial(library.connect_data, is_first=False))
            self._lanes.append(Lane(more, Barrier(label, more, Memory(None), None)))
        self._batches = Batches(
            self._lanes,
            self._memory,
            config.lease_s,
            any_memory=config.topology != "shared" and config.protocol == "tcp",
        )
        self._putter = Putter(
            label, self._batches, self._num_stored, self._size_of, config.discard_s
        )
        self._put_config = library.put_config(is_pinned=False)
        self._pin_config = library.put_config(is_pinned=True)
        if config.topology == "embedded":
            close_on_sigterm()

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> MooncakeStore:
        config = MooncakeConfig.of(url, mooncake_sources())
        log.info("%s: %s", url.label, config.describe())
        return cls(url.label, config)

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        MooncakeConfig.of(url, mooncake_sources())
        check_installed()

    @property
    def lease_s(self) -> float:
        return self._config.lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.check()
        check_call(keys)
        found = 0
        for start, end in _windows(len(keys)):
            found += self._num_stored(keys[start:end], start)
            if found < end:
                break
        return found

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Looks for all keys in one round trip; Mooncake leases those that it finds."""
        self._lifecycle.check()
        check_call(keys)
        codes = self._exist(keys) if keys else []
        for key, code in zip(keys, codes, strict=True):
            if code < 0:
                raise error_of(code, f"{self.label}: look for {key}")
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        for start, end in self._batches.split(keys, slots.sizes):
            n = self._get_batch(keys[start:end], slots.part(start, end), start)
            if start + n < end:
                return start + n
        return len(keys)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        for start, end in self._batches.split(keys, slots.sizes):
            batch = keys[start:end]
            config = self._pin_config if POOL_ID_KEY in batch else self._put_config
            n = self._putter.put(batch, slots.part(start, end), config, start)
            if start + n < end:
                return start + n
        return len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.check()
        check_call(keys)
        if not keys:
            return
        with self._lookup.call() as raw:
            codes = raw.batch_remove(list(keys), True)
        self._lookup.note(codes)
        self._putter.doubts.forget(keys)
        for key, code in zip(keys, codes, strict=True):
            if code < 0 and code not in MISSES:
                raise error_of(code, f"{self.label}: remove of {key}")

    def clear(self, namespace: str) -> None:
        """Forgets a namespace in one call of the master, by force: also values that are being read.

        Readers notice by verification. Half-written values stay.
        """
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        with self._lookup.call() as raw:
            code = raw.remove_by_regex(f"^{prefix}", True)  # without ^, hashes match too
        self._lookup.note([code])
        if code < 0:
            raise error_of(code, f"{self.label}: clear of {prefix}")
        self._putter.doubts.forget_all(prefix)

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Asks the master's HTTP server for the default tenant's values; their ages are unknown."""
        self._lifecycle.check()
        keys = [key for key in self._http.all_keys() if key.startswith(prefix)]
        for key, num_bytes in self._http.sizes(keys):
            yield StoredValue(BlockKey(key), num_bytes, None)

    def length_of(self, key: BlockKey) -> int | None:
        self._lifecycle.check()
        check_call([key])
        size = self._size_of(key)
        if size < 0 and size not in MISSES:
            raise error_of(size, f"{self.label}: look for {key}")
        return size if size >= 0 else None

    def room(self) -> Room:
        self._lifecycle.check()
        gauges = self._http.gauges()
        return Room(
            "Mooncake",
            int(gauges.get("master_allocated_bytes", 0)),
            int(gauges.get("master_total_capacity_bytes", 0)),
            int(gauges.get("master_evicted_key_count", 0)),
            "the least recently leased goes first",
        )

    def allocate(self, num_bytes: int) -> memoryview:
        if self._lifecycle.is_closed:  # in a forked child, too, where the library would hang
            return super().allocate(num_bytes)
        return self._memory.allocate(num_bytes)

    def codes(self) -> Mapping[str, int]:
        clients = (self._lookup, *(lane.client for lane in self._lanes))
        return sum((client.codes for client in clients), Counter())

    @property
    def connections(self) -> tuple[Client, Client]:
        """The connection to the master and the first that moves values, for measurements."""
        return self._lookup, self._data

    def close(self) -> None:
        if self._lifecycle.end():
            self._memory.disconnect()
            close_together((*(lane.client for lane in self._lanes), self._lookup))

    def _connect_data(self) -> Raw | int:
        raw = self._library.connect_data()
        if not isinstance(raw, int):
            self._memory.connect(raw)
        return raw

    def _get_batch(self, keys: Sequence[BlockKey], slots: Slots, num_done: int) -> int:
        begin = time.monotonic()
        codes = self._batches.get(keys, slots)
        if LEASE_OVER in codes and len(keys) > 1:
            half = len(keys) // 2
            codes = self._batches.get(keys[:half], slots.part(0, half))
            codes += self._batches.get(keys[half:], slots.part(half, len(keys)))
        for i, answer in enumerate(codes):
            if answer == slots.sizes[i]:
                continue
            code = self._why_refused(keys[i], slots.sizes[i]) if answer == INVALID else answer
            what = f"{self.label}: get of {keys[i]}"
            if code == TRANSFER_FAILED and time.monotonic() - begin > _SLOW_S:
                raise StoreTimeout(f"{what}: its holder does not answer", num_done=num_done + i)
            if code in MISSES:
                return i
            if code >= 0:
                raise WrongLength(f"{what}: not {slots.sizes[i]} bytes", num_done=num_done + i)
            raise error_of(code, what, num_done=num_done + i)
        return len(keys)

    def _why_refused(self, key: BlockKey, size: int) -> int:
        """Returns another length than `size`, the code of a value that has none, or INVALID."""
        found = self._size_of(key)
        return INVALID if found in (size, 0) else found

    def _num_stored(self, keys: Sequence[BlockKey], num_done: int = 0) -> int:
        """Returns how many of the first keys are there; one call, which leases all that are."""
        for i, code in enumerate(self._exist(keys)):
            if code == 0:
                return i
            if code < 0:
                raise error_of(code, f"{self.label}: match of {keys[i]}", num_done=num_done + i)
        return len(keys)

    def _exist(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns 1, 0 or a code for each key."""
        with self._lookup.call() as raw:
            codes = raw.batch_is_exist(list(keys))
        self._lookup.note(codes)
        return codes

    def _size_of(self, key: BlockKey) -> int:
        with self._lookup.call() as raw:
            size = raw.get_size(key)
        self._lookup.note([size])
        return size


def _windows(count: int) -> Iterator[tuple[int, int]]:
    """Yields the ends of growing windows, since keys behind a gap would be leased for nothing."""
    start, sizes = 0, iter(_WINDOWS)
    while start < count:
        end = min(start + next(sizes, _WINDOWS[-1]), count)
        yield start, end
        start = end
