"""ArenaStore: keeps values in a file of shared memory that P and D of one host copy to and from."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from pdstore.errors import ConfigError, StoreError, StoreUnavailable
from pdstore.format.keys import BlockKey, Kind, kind_of, prefix_of
from pdstore.native.arena import ArenaCounts, Filled, NativeArena, ValueBatch
from pdstore.native.engine import Ticket
from pdstore.native.library import Library, address_of, load_library
from pdstore.settings import Settings
from pdstore.store.arena.file import open_arena_file, why_not_found, why_too_long
from pdstore.store.arena.transfer import ArenaTransfer
from pdstore.store.base import FRESH_S, Lifecycle, Slots, Store, check_call, log_once
from pdstore.store.optional import ALL_KEYS, Room, StoredValue
from pdstore.store.transfer import TransferContext
from pdstore.store.url import Place, Reach, StoreURL

log = logging.getLogger(__name__)

ORPHAN_TIMEOUT_S = 5.0
"""Seconds for which the reserved slots of a dead process stay unused: its GPU may still write."""
LOCK_TIMEOUT_S = 5.0
DEFAULT_LEASE_S = 10.0
MAX_LEASE_S = 3600.0
DEFAULT_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_WHY_TWO = (
    ". An arena is one user's on one host, as /dev/shm/pdstore-UID-NAME in each instance's log: run"
    " both as one user, with one /dev/shm (containers: ipc: host). If both name the same file,"
    " restart the instance that ran while it was removed"
)
_KINDS = {Kind.BLOCK: 0, Kind.TAIL: 1, Kind.HANDOFF: 1, Kind.POOL: 2, Kind.PURGE: 2}


class ArenaStore(Store):
    """`shm://name?size=64GiB&lease=10&dir=/dev/shm&slab=64MiB`, for the processes of one host.

    All values lie in one file, `<dir>/pdstore-<uid>-<name>`, which every process maps; there is
    no server. The file and its values stay when the processes end, until somebody removes the file.
    P's GPU copies into the same bytes that D's GPU copies from (`fill`, `start_scatter`).

    A slab is cut into slots of one size. In a full arena, a new value evicts the value of its slot
    size that was used longest ago, or takes a slab of another slot size if all values of that slab
    were used even longer ago. Tails and markers expire after `PDSTORE_HANDOFF_TTL_S`.

    The arena's lock is held while the index changes, never while values are copied. A process that
    is killed, at any point, leaves only misses. While a process that holds the lock is suspended,
    other processes' calls raise StoreTimeout.

    directory: in a memory-backed file system. If that is mounted with `huge=always`, the arena has
      huge pages, which a GPU registers more quickly.
    size: bytes for values. None accepts an existing arena of any size; a new arena then has 20 GiB,
      or half of the free space if that is less.
    slab_bytes: the largest size of a value. None: 64 MiB, less in arenas below 1 GiB.
    orphan_timeout_s: seconds for which the reserved slots of a dead process stay unused.

    The constructor opens or makes the file. Raises ConfigError, StoreDenied or StoreUnavailable.
    """

    def __init__(
        self,
        library: Library,
        name: str = "pool",
        *,
        directory: Path = DEFAULT_DIRECTORY,
        size: int | None = None,
        slab_bytes: int | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        handoff_ttl_s: float = 600.0,
        fresh_s: float = FRESH_S,
        orphan_timeout_s: float = ORPHAN_TIMEOUT_S,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self.label = f"shm://{name}"
        self.path = path_of(directory, name)
        self._lifecycle = Lifecycle(self.label)
        self._lease_s = lease_s
        times = lease_s, fresh_s, handoff_ttl_s, orphan_timeout_s, lock_timeout_s
        fd = open_arena_file(self.path, library, size, slab_bytes)
        self._file = os.fstat(fd)
        try:
            self._arena = NativeArena(library, fd, times, f"{self.label} ({self.path})")
            there = self._arena.data_bytes
            slab = self._arena.slab_bytes
            if size is not None and size // slab * slab != there:
                self._arena.close()
                raise ConfigError(
                    f"{self.label}: {self.path} is there already with size={there}: use that, leave"
                    " ?size= away, or remove the file when nobody uses it"
                )
            self._memory: memoryview | None = self._map(fd)
        finally:
            os.close(fd)
        readable = ByteSize(there).human_readable()
        log_once(log, f"pool in {self.path}, {readable}: P and D must use it on the same host")

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> ArenaStore:
        options = _options_of(url)
        library = load_library(settings, for_gpu=False)
        if library is None:
            raise _without_library(url)
        return cls(library, handoff_ttl_s=settings.handoff_ttl_s, **options)

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        _options_of(url)
        if settings.native == "off":
            raise _without_library(url)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        options = _options_of(url)
        return Place(
            Reach.HOST,
            path_of(options["directory"], options["name"]),
            is_memory=True,
            trial_url=re.sub("//[^/?]*", f"//trial-{os.getpid()}", url.text, count=1),
            why_two=_WHY_TWO,
        )

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def span_bytes(self) -> int:
        """The size of the spans in which the memory may be registered with a device.

        The spans lie side by side from the start of the memory, and no value lies in two spans.
        """
        return self._arena.slab_bytes

    def memory(self) -> memoryview:
        """The memory that all values lie in. It is page-aligned, and the same at every call.

        End all copies to and from this memory before you close the store: `close` unmaps the memory
        as soon as no view of it is left.
        """
        return self._enter()

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._enter(keys)
        return sum(self._arena.find(keys, leases=True))

    def renew(self, keys: Sequence[BlockKey], first: int, since: float) -> int:
        """Matches keys, and leases them again, except values of a prompt's saves that were read.

        first, since: the index of the first key that they stored, and when they began (monotonic).
        """
        self._enter(keys)
        return sum(self._arena.find(keys, leases=True, lease_only_unread=(first, since)))

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._enter(keys)
        return self._arena.find(keys, leases=False)

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not is_there for is_there in self.which_stored(keys)]

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        self._enter()
        return self._arena.wait_for_change(seen or 0, 0.0 if seen is None else timeout_s)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        memory = self._enter(keys, slots)
        if not keys:
            return 0
        return self._arena.get(address_of(memory), keys, _addresses(slots), slots.sizes)

    def peek(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        memory = self._enter(keys, slots)
        if not keys:
            return 0
        values = _addresses(slots), slots.sizes
        return self._arena.get(address_of(memory), keys, *values, keeps_leases=True)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        memory = self._enter(keys, slots)
        if not keys:
            return 0
        values = _kinds(keys), _addresses(slots), slots.sizes
        return self._arena.put(address_of(memory), keys, *values)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._enter(keys)
        if keys:
            self._arena.remove(keys)

    def clear(self, namespace: str) -> None:
        self._enter()
        self._arena.clear(prefix_of(namespace))

    def fill(self, batches: Sequence[ValueBatch]) -> Filled:
        """Stores values in one call of the library: reserves slots, gathers, seals and publishes.

        Evicts as `put` does. Other Python threads can run during the whole call.

        batches: at least one. The batches are published in the order given, each when its copies
          have ended.
        Returns the stored values, with an error if a batch found no room or if the arena's lock
        was not free in time. Raises LayoutError or SwapError if the copies fail.
        """
        memory = self._enter()
        kinds = b"".join([_kinds(batch.keys) for batch in batches])
        return self._arena.fill(batches, address_of(memory), kinds)

    def start_scatter(self, batch: ValueBatch) -> Ticket | None:
        """Starts to scatter all values of a batch from the arena's memory; ends their leases soon.

        Returns None, and copies nothing, if any value is missing or is seen to be wrong, or if the
        lock is not free in time. Values may be evicted during the copies and are verified after
        them, so the caller must wait for the copies and then call `confirm`. Raises LayoutError or
        SwapError if the copies cannot begin.
        """
        return self._arena.start_scatter(batch, address_of(self._enter()))

    def confirm(self, copies: Ticket) -> tuple[int, int]:
        """Returns how many leading values are still stored, and how many were right when copied.

        Use only values that both numbers count. Call it when all of the copies have ended.
        """
        self._enter()
        return self._arena.confirm(copies)

    def transfer(self, context: TransferContext) -> ArenaTransfer | None:
        """Opens the way by copies in the arena's memory; None without the native library."""
        if context.copies.native is None:
            return None
        try:
            view = self.memory()
            span_bytes = self.span_bytes
        except StoreError as error:
            log.warning("its memory is not there now, so values go through staging: %s", error)
            return None
        log.info("%s: values are copied in its own memory, without staging", self.label)
        memory = context.pin(view, span_bytes)
        return ArenaTransfer(context, context.copies.native, self, memory)

    def counts(self) -> ArenaCounts:
        """Counts the slots by state. It scans every slot, so it is slow for a large arena."""
        self._enter()
        return self._arena.counts()

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        self._enter()
        for key, num_bytes, age_s in self._arena.values():
            if key.startswith(prefix):
                yield StoredValue(BlockKey(key), num_bytes, age_s)

    def length_of(self, key: BlockKey) -> int | None:
        """Scans all values, so it is slow for a large arena."""
        check_call([key])
        return next((v.num_bytes for v in self.stored_values(key) if v.key == key), None)

    def room(self) -> Room:  # a slab that is cut into slots counts as used
        used_bytes = self.counts().slabs * self._arena.slab_bytes
        policy = "the least recently used of its size goes first"
        problem = why_not_found(self.path, self._file)
        there = self._arena.data_bytes
        return Room("shared memory", used_bytes, there, None, policy, problem=problem)

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        self._enter()
        return self._arena.age_of_oldest(max(sizes), len(sizes)) if sizes else None

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        self._enter(keys)
        return self._arena.make_room(keys, _kinds(keys), sizes)

    def use(self, keys: Sequence[BlockKey]) -> None:
        self._enter(keys)
        self._arena.use(keys)

    def why_too_long(self, num_bytes: int) -> str | None:
        return why_too_long(self.path, num_bytes, self._arena.slab_bytes)

    def close(self) -> None:
        if self._lifecycle.end():
            self._arena.close()
            self._memory = None  # it is unmapped when no view of it is left

    def _enter(self, keys: Sequence[BlockKey] = (), slots: Slots | None = None) -> memoryview:
        """Checks the arguments of a call, and that the store is open; returns the memory."""
        memory = self._memory  # read before the check: `close` ends the life before it drops this
        self._lifecycle.enter(keys, slots)
        assert memory is not None
        return memory

    def _map(self, fd: int) -> memoryview:
        try:
            mapped = mmap.mmap(fd, self._arena.data_bytes, offset=self._arena.data_at)
        except OSError as error:
            raise StoreUnavailable(f"{self.label}: cannot map {self.path}: {error}") from error
        with contextlib.suppress(OSError):  # some kernels have no huge pages for such files
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)


def path_of(directory: Path, name: str) -> Path:
    """Returns where this user's arena of a name is."""
    return directory / f"pdstore-{os.geteuid()}-{name}"


def _options_of(url: StoreURL) -> dict[str, Any]:
    """Returns a URL's name, directory, lease, size and slab size. Raises ConfigError."""
    if url.path not in ("", "/") or url.port is not None:
        raise ConfigError(f"{url.label}: write shm://name, and the directory as ?dir=/dev/shm")
    sizes = {"size": url.size("size", 0) or None, "slab_bytes": url.size("slab", 0) or None}
    lease_s = url.seconds("lease", DEFAULT_LEASE_S)
    directory = Path(url.options.pop("dir", str(DEFAULT_DIRECTORY)))
    url.finish("size, lease, dir, slab")
    name = url.host or "pool"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{url.label}: a name has 1 to 64 of a-z, 0-9, '.', '_' and '-'")
    if lease_s > MAX_LEASE_S:
        raise ConfigError(f"{url.label}: lease must be at most {MAX_LEASE_S:g} seconds")
    if not directory.is_dir():
        raise ConfigError(f"{url.label}: {directory} is no directory: name one with ?dir=")
    return {"name": name, "directory": directory, "lease_s": lease_s, **sizes}


def _without_library(url: StoreURL) -> ConfigError:
    return ConfigError(
        f"{url.label} needs the native library: install cmake and a C++ compiler, do not"
        " set PDSTORE_NATIVE=off, and run `pdstore doctor`, which builds it"
    )


def _kinds(keys: Sequence[str]) -> bytes:
    """Returns the kind of each key as a byte, for the library."""
    return bytes([_KINDS[kind_of(BlockKey(key))] for key in keys])


def _addresses(slots: Slots) -> list[int]:
    base = address_of(slots.view)
    return [base + number * slots.slot_bytes for number in slots.numbers]
