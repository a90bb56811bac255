"""NativeArena: an arena of libpdstore, which keeps values by key in a file that processes map."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from pdstore import errors
from pdstore.errors import StoreError
from pdstore.native import library as abi
from pdstore.native.engine import Engine, Ticket
from pdstore.native.library import Library, checked, joined

_SHORT_BATCH = 64
_PATIENCE_NS = 50_000
_BATCH_PATIENCE_NS = 20_000_000  # not longer: the end of a job waits for such a call
_PAGE_VALUES = 512
_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    abi.Code.CLOSED: (errors.StoreClosed, "is closed, or belongs to the parent process"),
    abi.Code.TIMEOUT: (errors.StoreTimeout, "is locked: a process that has it open does not go on"),
    abi.Code.FULL: (
        errors.StoreFull,
        "has no room: all values are leased, or this one is too large",
    ),
    abi.Code.FORMAT: (
        errors.StoreUnavailable,
        "is no arena of this version and this boot, or damaged: remove it",
    ),
    abi.Code.SYSTEM: (errors.StoreUnavailable, "cannot be mapped"),
    abi.Code.MEMORY: (errors.StoreUnavailable, "finds no memory in this process"),
    abi.Code.VALUE: (StoreError, "has lost values while they were stored"),
    abi.Code.LENGTH: (errors.WrongLength, "has a value of another length"),
}


class ArenaCounts(NamedTuple):
    """Counts of an arena's slots in each state, and of the slabs that are cut into slots."""

    stored: int
    reserved: int
    resting: int
    free: int
    slabs: int


class ValueBatch(NamedTuple):
    """Values of an arena, and the copies between them and a paged cache.

    The copies are packed as `Engine.submit` takes them; the library sets their payloads.
    """

    keys: Sequence[str]
    sizes: bytes  # int64 each, headers included
    starts: bytes  # the first 56 bytes of each value, side by side
    engine: Engine  # makes the copies
    items: bytes
    block_ids: bytes
    ready: int = 0  # a CUDA event's handle that the copies wait for; 0: for nothing

    @property
    def num_values(self) -> int:
        """The number of values."""
        return len(self.sizes) // 8

    @property
    def num_bytes(self) -> int:
        """The bytes of all values."""
        return sum(memoryview(self.sizes).cast("q"))

    def values(self, memory: int) -> ctypes.Structure:
        """Returns the batch as the library's struct; the batch must outlive the struct.

        memory: the address where this process maps the arena's values.
        """
        return abi.Values(
            keys=joined(self.keys),
            sizes=self.sizes,
            starts=self.starts,
            items=self.items,
            ids=self.block_ids,
            count=self.num_values,
            num_ids=len(self.block_ids) // 8,
            memory=memory,
            ready=self.ready,
            lock_ns=_BATCH_PATIENCE_NS,
        )


class Filled(NamedTuple):
    """The values that `NativeArena.fill` has stored, by index, and their bytes.

    error: why not all values are stored; None if all are. After an error, only the values of the
      first batches are stored, or none.
    """

    indices: Sequence[int]
    num_bytes: int
    error: StoreError | None


class NativeArena:
    """An open arena. Any thread may call it; a call fails with a StoreError.

    fd: the file's descriptor; the caller closes it.
    times: five times in seconds: the lease that a match or a load gives; how long a new value is
      not evicted; how long tails and markers live after their last use; how long slots that a dead
      process had reserved are not reused; how long a call waits for the lock before it raises
      StoreTimeout.
    label: begins the errors' messages.
    Raises StoreUnavailable for a file that is no arena, StoreFull if too many have it open.
    """

    def __init__(self, library: Library, fd: int, times: Sequence[float], label: str) -> None:
        self._label = label
        self._handle = c_void_p()
        self.library = library
        self._calls = library.calls
        self._short_calls = library.short_calls
        options = abi.ArenaOptions(*[int(seconds * 1e9) for seconds in times])
        info = abi.ArenaInfo()
        code = self._calls.pds_arena_open(fd, byref(options), byref(self._handle), byref(info))
        self._check(code)
        self.data_at = int(info.data_at)
        self.data_bytes = int(info.data_bytes)
        self.slab_bytes = int(info.slab_bytes)
        _open_arenas.add(self)

    def close(self) -> None:
        """Closes the arena for this process, after running calls. A second call does nothing.

        The child of a fork closes only its own copy.
        """
        self._calls.pds_arena_close(self._handle)

    def __del__(self) -> None:
        if self._handle:
            self._calls.pds_arena_free(self._handle)

    def find(self, keys: Sequence[str], *, leases: bool) -> list[bool]:
        """Returns for each key whether it is stored.

        leases: True to lease the leading stored keys, and to stop at the first missing key.
        """
        # A short call keeps Python's lock, because a busy engine would give it back late. A long
        # batch, or a call that has to wait for the arena's lock, releases Python's lock.
        stored, code = (c_uint8 * len(keys))(), int(abi.Code.TIMEOUT)
        values = joined(keys), len(keys), leases, stored
        if len(keys) <= _SHORT_BATCH:
            code = self._short_calls.pds_arena_find(self._handle, _PATIENCE_NS, *values)
        if code == abi.Code.TIMEOUT:
            code = self._calls.pds_arena_find(self._handle, -1, *values)
        self._check(code)
        return list(map(bool, bytes(stored)))

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets values, leased or not."""
        self._check(self._calls.pds_arena_remove(self._handle, joined(keys), len(keys)))

    def clear(self, prefix: str) -> None:
        """Forgets every value whose key begins with `prefix`, which must not be empty."""
        self._check(self._calls.pds_arena_clear(self._handle, prefix.encode()))

    def counts(self) -> ArenaCounts:
        """Counts the slots by state. It scans every slot, so it is slow for a large arena."""
        counts = abi.SlotCounts()
        self._check(self._calls.pds_arena_count(self._handle, byref(counts)))
        return ArenaCounts(*(getattr(counts, name) for name in ArenaCounts._fields))

    def age_of_oldest(self, num_bytes: int, num_values: int) -> float | None:
        """Returns how many seconds ago the value was used that goes first for so many new ones.

        num_bytes: of each of them. None if none has to go, or none may.
        """
        age = c_int64()
        code = self._calls.pds_arena_oldest(self._handle, num_bytes, num_values, byref(age))
        self._check(code)
        return age.value / 1e9 if age.value >= 0 else None

    def make_room(self, keys: Sequence[str], kinds: bytes, sizes: Sequence[int]) -> bool:
        """Evicts, leased values too, until all of these have room; returns whether they have."""
        values = joined(keys), kinds, (c_int64 * len(keys))(*sizes), len(keys)
        code = self._calls.pds_arena_make_room(self._handle, *values)
        if code != abi.Code.FULL:
            self._check(code)
        return bool(code == abi.Code.OK)

    def values(self) -> Iterator[tuple[str, int, float | None]]:
        """Yields key, bytes and seconds since the last use of each value, in no order.

        The age is None if the stored time is impossible. The lock is held for one page at a time.
        """
        page, following, count = (abi.ArenaValue * _PAGE_VALUES)(), c_int64(0), c_int64()
        while following.value >= 0:
            self._check(
                self._calls.pds_arena_list(
                    self._handle, byref(following), page, _PAGE_VALUES, byref(count)
                )
            )
            for value in page[: count.value]:
                age_s = value.age_ns / 1e9 if value.age_ns >= 0 else None
                yield value.key.decode("ascii", "replace"), value.bytes, age_s

    def put(
        self,
        memory: int,
        keys: Sequence[str],
        kinds: bytes,
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> int:
        """Copies values in, unless they are stored; returns how many leading values it took.

        memory: where this process has mapped the arena's memory.
        """
        count, done = len(keys), c_int64()
        sources, lengths = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        values = memory, joined(keys), kinds, sources, lengths, count, byref(done)
        code = self._calls.pds_arena_put(self._handle, -1, *values)
        self._check(code, done.value)
        return done.value

    def get(
        self, memory: int, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """Copies values out of the arena; returns how many leading keys were stored."""
        count, done = len(keys), c_int64()
        targets, lengths = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        code = self._calls.pds_arena_get(
            self._handle, memory, joined(keys), targets, lengths, count, byref(done)
        )
        self._check(code, done.value)
        return done.value

    def fill(self, batches: Sequence[ValueBatch], memory: int, kinds: bytes) -> Filled:
        """Stores the values of all batches: reserves, gathers, seals and publishes.

        Batches are published in the order given, each when its copies have ended.

        batches: at least one; all must be of one engine.
        memory: the address where this process maps the arena's values.
        kinds: a byte for each value of all batches: PDS_BLOCK, PDS_SHORT_LIVED or PDS_FOREVER.
        Raises LayoutError or SwapError.
        """
        counts = [batch.num_values for batch in batches]
        is_new, num_done, fill = (c_uint8 * sum(counts))(), c_int64(), self._calls.pds_arena_fill
        values = (abi.Values * len(batches))(*(batch.values(memory) for batch in batches))
        what = values, len(batches), kinds
        with batches[0].engine.lent() as engine:
            code = checked(fill, self._handle, engine, *what, is_new, byref(num_done))
        done = batches[: num_done.value]
        indices = [i for i, new in enumerate(is_new[: sum(counts[: len(done)])]) if new]
        sizes = memoryview(b"".join([batch.sizes for batch in done])).cast("q")
        why = None if code == abi.Code.OK else self._error(code)
        return Filled(indices, sum([sizes[i] for i in indices]), why)

    def start_scatter(self, batch: ValueBatch, memory: int) -> Ticket | None:
        """Leases values and starts to scatter them; the caller waits for the copies.

        memory: the address where this process maps the arena's values.
        Returns None, and copies nothing, if a value is missing or is seen to be wrong, or if the
        lock is not free soon. Raises LayoutError or SwapError.
        """
        handle, values = c_void_p(), byref(batch.values(memory))
        with batch.engine.lent() as engine:
            code = checked(self._calls.pds_arena_take, self._handle, engine, values, byref(handle))
        return None if code else Ticket(self.library, handle)

    def confirm(self, copies: Ticket) -> tuple[int, int]:
        """Returns how many leading values are still stored, and how many were right when copied.

        copies: a ticket of `start_scatter` whose copies have ended.
        """
        there, right = c_int64(), c_int64()
        out = byref(there), byref(right)
        self._check(self._short_calls.pds_arena_confirm(self._handle, copies.handle, *out))
        return there.value, right.value

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Waits until the count of publications is not `seen`; returns the count."""
        changes = c_uint32()
        timeout_us = int(max(timeout_s, 0.0) * 1e6)
        self._check(self._calls.pds_arena_wait(self._handle, seen, timeout_us, byref(changes)))
        return changes.value

    def _check(self, code: int, num_done: int = 0) -> None:
        if code != abi.Code.OK:
            raise self._error(code, num_done)

    def _error(self, code: int, num_done: int = 0) -> StoreError:
        if code == abi.Code.ARGUMENT:
            raise ValueError(f"{self._label}: the library refuses an argument")
        error, why = _ERRORS[code]
        return error(f"{self._label} {why}", num_done=num_done)


_open_arenas: weakref.WeakSet[NativeArena] = weakref.WeakSet()


def _close_all() -> None:
    for arena in list(_open_arenas):
        arena.close()


# a child that kept the file open would keep its parent's locks after the parent's death
os.register_at_fork(after_in_child=_close_all)


def format_arena(library: Library, fd: int, num_bytes: int, slab_bytes: int, seed: int) -> None:
    """Turns an empty file into an arena; nobody else may have the file open.

    num_bytes: bytes of memory for values, a multiple of `slab_bytes`.
    seed: a random number, for the hashes of this arena's keys.
    Raises ValueError for sizes that no arena has, OSError if the file system refuses.
    """
    code = library.calls.pds_arena_format(fd, num_bytes, slab_bytes, seed)
    if code == abi.Code.ARGUMENT:
        raise ValueError(f"no arena has {num_bytes} bytes in slabs of {slab_bytes}")
    if code:
        raise OSError("the file system refuses to make the file so large")
