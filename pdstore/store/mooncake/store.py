"""MooncakeStore: keeps blocks in a Mooncake pool that many hosts share."""

from __future__ import annotations

import http.client
import json
import logging
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote

from pdstore.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable, WrongLength
from pdstore.format.keys import BlockKey, prefix_of
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store
from pdstore.store.mooncake.batches import Batches, Memory, is_pinned
from pdstore.store.mooncake.client import Client, Server, close_on_sigterm, close_together
from pdstore.store.mooncake.library import (
    ABSENT,
    INVALID,
    LEASE_OVER,
    MISSES,
    TRANSFER_FAILED,
    Library,
    MooncakeConfig,
    Raw,
    check_installed,
    error_of,
    is_outage,
)
from pdstore.store.optional import ALL_KEYS, Room, StoredValue
from pdstore.store.url import Place, StoreURL

log = logging.getLogger(__name__)

_WINDOWS = (32, 128, 512)
_SLOW_S = 0.8  # a transfer that fails later than this has waited for a hung peer
_WRITER_TIMEOUT_S = 1.0  # a put waits so long for another writer of the same key
_MAX_EVICTIONS = 3
_MAX_BYTES = 4 << 20  # of an HTTP answer; the master's /metrics has a hundredth of that
_MAX_KEY_BYTES = 1 << 30  # of the list of keys; enough for 14 million keys
_ASKED_AT_ONCE = 64
_GAUGE = re.compile(r"^(\w+) (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE | re.ASCII)


class MooncakeStore(Store):
    """A store at `mooncake://master:50051?topology=holder`; `MooncakeConfig` lists the options.

    `mooncake://` without a host takes what Mooncake's own variables or JSON file say.

    It has one connection to the master, for `match` and `remove`, and one or several (`connections`
    in the URL) that move values. Each is made at its first use. A value stays until the master
    evicts it; the master evicts the least recently leased values first. The pool's id is pinned.

    A value that is evicted, half-written, or in the memory of a process that died is a miss. While
    the master does not answer, calls raise StoreUnavailable or StoreTimeout. If the library gives a
    call up, `get` or `put` waits until the call's transfers have ended (`Client.move`).

    library, server: make the connections to Mooncake; tests pass objects of their own.

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
        self._memory = None if config.is_tcp else Memory()
        master = server(label, config.master)
        self._lookup = Client(label, master, library.connect_lookup)
        forget = self._memory.disconnect if self._memory else lambda: None
        self._movers = [Client(label, master, self._connect_data, forget)]
        for _ in range(1, config.num_connections):
            connect = partial(library.connect_data, is_first=False)
            self._movers.append(Client(label, master, connect))
        self._batches = Batches(self._movers, self._memory, config.lease)
        self._put_config = library.put_config(is_pinned=False)
        self._pin_config = library.put_config(is_pinned=True)
        if config.topology == "embedded":
            close_on_sigterm()

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> MooncakeStore:
        config = MooncakeConfig.from_url(url)
        if url.host:
            return cls(url.label, config)
        log.info("mooncake://: %s", config.described())
        return cls(f"mooncake://{config.master}", config)

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        MooncakeConfig.from_url(url)
        check_installed()

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        return Place(locks_memory=MooncakeConfig.from_url(url).protocol == "rdma")

    @property
    def origins(self) -> str:
        return self._config.described()

    @property
    def lease_s(self) -> float:
        return self._config.lease

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Asks for few keys first, then for more: keys after a miss would be leased for nothing."""
        self._lifecycle.enter(keys)
        found = 0
        windows = iter(_WINDOWS)
        while found < len(keys):
            window = keys[found : found + next(windows, _WINDOWS[-1])]
            num_stored = self._num_stored(window, found)
            found += num_stored
            if num_stored < len(window):
                break
        return found

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Searches for all keys in one round trip; Mooncake leases the keys that are stored."""
        self._lifecycle.enter(keys)
        codes = self._exist(keys) if keys else []
        for key, code in zip(keys, codes, strict=True):
            if code < 0:
                raise error_of(code, f"{self.label}: look for {key}")
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._get_batch)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._in_batches(keys, slots, self._put_batch)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.enter(keys)
        if not keys:
            return
        codes = self._lookup.codes_of(lambda raw: raw.batch_remove(list(keys), True))
        for key, code in zip(keys, codes, strict=True):
            if code < 0 and code not in MISSES:
                raise error_of(code, f"{self.label}: remove of {key}")

    def clear(self, namespace: str) -> None:
        """Forgets a namespace in one call of the master, even values that are leased or being read.

        A reader of such a value notices it when it verifies the value. Half-written values stay.
        """
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        # ^: else the expression could match a hash within another namespace's key
        [code] = self._lookup.codes_of(lambda raw: [raw.remove_by_regex(f"^{prefix}", True)])
        if code < 0:
            raise error_of(code, f"{self.label}: clear of {prefix}")

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Asks the master's HTTP server for the values of the default tenant; ages are unknown.

        The HTTP server has no password, so often it listens only on the master's host; in that case
        only that host can list values. Listing leases nothing. Values without a replica are left
        out, because they are missing or not whole.
        """
        self._lifecycle.check()
        every = self._ask_master("/get_all_keys", _MAX_KEY_BYTES).split()
        keys = [key for key in every if key.startswith(prefix)]
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            names = ",".join(keys[start : start + _ASKED_AT_ONCE])
            answer = self._ask_master(f"/batch_query_keys?keys={quote(names)}")
            try:
                values = [
                    StoredValue(BlockKey(key), sum(part["size_"] + 0 for part in parts), None)
                    for key, value in json.loads(answer)["data"].items()
                    if (parts := value.get("values"))
                ]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise StoreUnavailable(
                    f"{self.label}: the HTTP server at {self._config.master_http} answers, but not"
                    f" as Mooncake's master does ({answer[:80]!r})",
                    remedy="name the master's port by ?metrics_port=",
                ) from error
            yield from values

    def length_of(self, key: BlockKey) -> int | None:
        self._lifecycle.enter([key])
        size = self._size_of(key)
        if size < 0 and size not in MISSES:
            raise error_of(size, f"{self.label}: look for {key}")
        return size if size >= 0 else None

    def room(self) -> Room:
        self._lifecycle.check()
        found = _GAUGE.findall(self._ask_master("/metrics"))
        gauges = {name: float(value) for name, value in found}
        return Room(
            "Mooncake",
            int(gauges.get("master_allocated_bytes", 0)),
            int(gauges.get("master_total_capacity_bytes", 0)),
            int(gauges.get("master_evicted_key_count", 0)),
            "the least recently leased goes first",
        )

    def allocate(self, num_bytes: int) -> memoryview:
        if self._memory is None or self._lifecycle.is_closed:  # a forked child's store is closed
            return super().allocate(num_bytes)
        return self._memory.allocate(num_bytes)

    def codes(self) -> Mapping[str, int]:
        return sum((client.codes for client in (self._lookup, *self._movers)), Counter())

    @property
    def connections(self) -> tuple[Client, Client]:
        """The connection to the master, and the first one that moves values; for measurements."""
        return self._lookup, self._movers[0]

    def close(self) -> None:
        if self._lifecycle.end():
            close_together((*self._movers, self._lookup))

    def _connect_data(self) -> Raw | int:
        raw = self._library.connect_data()
        if self._memory is not None and not isinstance(raw, int):
            self._memory.connect(raw)
        return raw

    def _in_batches(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        move: Callable[[Sequence[BlockKey], Slots], int],
    ) -> int:
        """Moves batches in turn until one is not whole; returns how many values were moved."""
        self._lifecycle.enter(keys, slots)
        for start, end in self._batches.split(keys, slots.sizes):
            try:
                n = move(keys[start:end], slots.part(start, end))
            except StoreError as error:
                error.num_done += start
                raise
            if start + n < end:
                return start + n
        return len(keys)

    def _get_batch(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        begin = time.monotonic()
        codes = self._batches.get(keys, slots)
        if LEASE_OVER in codes and len(keys) > 1:
            half = len(keys) // 2
            codes = self._batches.get(keys[:half], slots.part(0, half))
            codes += self._batches.get(keys[half:], slots.part(half, len(keys)))
        for i, (key, size, code) in enumerate(zip(keys, slots.sizes, codes, strict=True)):
            if code == size:
                continue
            if code == INVALID:  # a value of another length gives this code, too
                found = self._size_of(key)
                code = INVALID if found in (size, 0) else found
            what = f"{self.label}: get of {key}"
            if code == TRANSFER_FAILED and time.monotonic() - begin > _SLOW_S:
                raise StoreTimeout(f"{what}: its holder does not answer", num_done=i)
            if code in MISSES:
                return i
            if code >= 0:
                raise WrongLength(f"{what}: not {size} bytes", num_done=i)
            raise error_of(code, what, num_done=i)
        return len(keys)

    def _put_batch(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Puts a batch; returns how many of its leading keys can be read now. Raises StoreError.

        If another writer has begun to put a key, Mooncake reports success and drops the bytes, even
        if that writer has not finished or never will. So after every put the store searches for the
        keys, and counts only those that can be read. The search also leases them, so that a long
        prompt does not evict its own first blocks.
        """
        config = self._pin_config if is_pinned(keys[0]) else self._put_config
        codes = self._batches.put(keys, slots, config)
        num_put = next((i for i, code in enumerate(codes) if code < 0), len(keys))
        for key, code in zip(keys, codes, strict=True):
            if is_outage(code):
                raise error_of(code, f"{self.label}: put of {key}", num_done=num_put)
        stored = self._num_stored(keys)
        num_evictions = 0
        end = time.monotonic() + _WRITER_TIMEOUT_S
        pause = 0.002
        while stored < len(keys) and codes[stored] >= 0:
            what = f"{self.label}: {keys[stored]}"
            if self._size_of(keys[stored]) != ABSENT:  # another writer is at work
                if time.monotonic() > end:
                    log.warning("%s is half-written by another client", what)
                    return stored
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            elif num_evictions == _MAX_EVICTIONS:
                raise StoreFull(f"{what} is evicted as soon as it is put", num_done=stored)
            else:
                num_evictions += 1
                others = slots.part(stored, len(keys))
                codes[stored:] = self._batches.put(keys[stored:], others, config)
            stored += self._num_stored(keys[stored:], stored)
        if stored < len(keys):
            what = f"{self.label}: put of {keys[stored]}"
            raise error_of(codes[stored], what, num_done=stored)
        return stored

    def _num_stored(self, keys: Sequence[BlockKey], num_done: int = 0) -> int:
        """Returns how many leading keys are stored, by one call, which leases all stored keys.

        num_done: how many keys of the store's call came before these, for the errors' `num_done`.
        """
        for i, code in enumerate(self._exist(keys)):
            if code == 0:
                return i
            if code < 0:
                raise error_of(code, f"{self.label}: match of {keys[i]}", num_done=num_done + i)
        return len(keys)

    def _exist(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key 1 if it is stored, 0 if it is not, or an error code."""
        return self._lookup.codes_of(lambda raw: raw.batch_is_exist(list(keys)))

    def _size_of(self, key: BlockKey) -> int:
        [size] = self._lookup.codes_of(lambda raw: [raw.get_size(key)])
        return size

    def _ask_master(self, path: str, most_bytes: int = _MAX_BYTES) -> str:
        """Returns the answer of the master's HTTP server. Raises StoreUnavailable."""
        address = self._config.master_http
        problem = f"more than {most_bytes} bytes"
        try:  # without the environment's proxies, which are for other networks
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://{address}{path}", timeout=5.0) as answer:
                body: bytes = answer.read(most_bytes + 1)
                if answer.length and len(body) <= most_bytes:
                    problem = "an answer that was cut"
                elif len(body) <= most_bytes:
                    return body.decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            problem = f"no answer ({getattr(error, 'reason', error)})"
        raise StoreUnavailable(
            f"{self.label}: only the master's HTTP server can list a pool, and at {address} there"
            f" is {problem}",
            remedy="name its port by ?metrics_port=, and ask on the master's host if it listens"
            " there alone",
        )
