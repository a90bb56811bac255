"""NativeArena: an arena of libpdstore, a file with values by key, shared by many processes."""

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
_FIND_TIMEOUT_NS = 50_000
_BATCH_TIMEOUT_NS = 20_000_000  # short, because a job cannot end while such a call runs
_PAGE_VALUES = 512
_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    abi.Code.CLOSED: (errors.StoreClosed, "is closed, or belongs to the parent process"),
    abi.Code.TIMEOUT: (errors.StoreTimeout, "is locked: a process that has it open does not go on"),
    abi.Code.FULL: (
        errors.StoreFull,
        "has no room: all values are leased, this one is too large, or 512 stores have it open",
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
    """The number of an arena's slots in each state, and of its slabs that are cut into slots."""

    stored: int
    reserved: int
    resting: int
    free: int
    slabs: int


class ValueBatch(NamedTuple):
    """Values of an arena, and the copies between them and a paged cache.

    The library fills in the addresses of the payloads.
    """

    keys: Sequence[str]
    sizes: bytes  # the bytes of each value with its header, as an int64
    starts: bytes  # the first 56 bytes of each value, one after the other
    engine: Engine  # makes the copies
    items: bytes  # packed as `Engine.submit` takes them
    block_ids: bytes  # packed as `Engine.submit` takes them
    ready: int = 0  # handle of the CUDA event for which the copies wait; 0: they do not wait

    @property
    def num_values(self) -> int:
        return len(self.sizes) // 8

    @property
    def num_bytes(self) -> int:
        """The total bytes of all values, headers included."""
        return sum(memoryview(self.sizes).cast("q"))

    def values(self, memory: int) -> ctypes.Structure:
        """Returns the batch as the library's struct; the batch must outlive the struct."""
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
            lock_timeout_ns=_BATCH_TIMEOUT_NS,
        )


class Filled(NamedTuple):
    """The result of `NativeArena.fill`.

    indices: which of the values this call has stored, counted over all batches.
    num_bytes: the total bytes of the values at these indices.
    error: None if all values are stored now, else why not. After an error, `indices` has only
      values of the leading batches that were stored whole.
    """

    indices: Sequence[int]
    num_bytes: int
    error: StoreError | None


class NativeArena:
    """An open arena. Any thread may call it. A call that fails raises a StoreError.

    The argument `memory` of some calls is the address where this process maps the arena's values.

    fd: the file's descriptor; the caller closes it.
    times: five times in seconds: the lease that a match gives; how long a new value is
      not evicted; how long tails and markers live after their last use; how long slots that a dead
      process had reserved are not reused; how long a call waits for the lock before it raises
      StoreTimeout.
    label: the text with which error messages begin.
    Raises StoreUnavailable for a file that is no arena, StoreFull if 512 stores have it open.
    """

    def __init__(self, library: Library, fd: int, times: Sequence[float], label: str) -> None:
        self._label = label
        self._handle = c_void_p()
        self.library = library
        self._calls = library.calls
        self._calls_holding_gil = library.calls_holding_gil
        options = abi.ArenaOptions(*[int(seconds * 1e9) for seconds in times])
        info = abi.ArenaInfo()
        code = self._calls.pds_arena_open(fd, byref(options), byref(self._handle), byref(info))
        self._check(code)
        self.data_at = int(info.data_at)
        self.data_bytes = int(info.data_bytes)
        self.slab_bytes = int(info.slab_bytes)
        _open_arenas.add(self)

    def close(self) -> None:
        """Waits until no call runs, then closes the arena for this process. May be called again.

        In the child of a fork, it leaves the parent's arena open.
        """
        self._calls.pds_arena_close(self._handle)

    def __del__(self) -> None:
        if self._handle:
            self._calls.pds_arena_free(self._handle)

    def find(
        self,
        keys: Sequence[str],
        *,
        leases: bool,
        lease_only_unread: tuple[int, float] | None = None,
    ) -> list[bool]:
        """Returns for each key whether it is stored.

        leases: True to lease the leading values that are stored. Then the keys after the first
          missing one are not looked up, and count as missing.
        lease_only_unread: an index and a monotonic time: from this key on, a value that was put or
          leased after that time is leased only if nobody has read it since.
        """
        # A call for few keys keeps the GIL, because beside a busy engine it takes long to get
        # it back. A call for many keys, or one that waits for the arena's lock, gives it up.
        stored = (c_uint8 * len(keys))()
        code = int(abi.Code.TIMEOUT)
        first, at = lease_only_unread or (len(keys), 0.0)
        values = joined(keys), len(keys), leases, first, int(at * 1e9), stored
        if len(keys) <= _SHORT_BATCH:
            code = self._calls_holding_gil.pds_arena_find(self._handle, _FIND_TIMEOUT_NS, *values)
        if code == abi.Code.TIMEOUT:
            code = self._calls.pds_arena_find(self._handle, -1, *values)
        self._check(code)
        return list(map(bool, bytes(stored)))

    def remove(self, keys: Sequence[str]) -> None:
        """Removes the values of these keys, even if they are leased."""
        self._check(self._calls.pds_arena_remove(self._handle, joined(keys), len(keys)))

    def clear(self, prefix: str) -> None:
        """Removes every value whose key begins with `prefix`, which must not be empty."""
        self._check(self._calls.pds_arena_clear(self._handle, prefix.encode()))

    def counts(self) -> ArenaCounts:
        """Returns how many slots are in each state. Reads every slot: slow for a large arena."""
        counts = abi.SlotCounts()
        self._check(self._calls.pds_arena_count(self._handle, byref(counts)))
        return ArenaCounts(*(getattr(counts, name) for name in ArenaCounts._fields))

    def age_of_oldest(self, num_bytes: int, num_values: int) -> float | None:
        """Returns the seconds since the last use of the value that would be evicted first.

        num_bytes, num_values: the size of each value that is to be stored, and their number.
        Returns None if they have room without evicting, or if no value may be evicted.
        """
        age = c_int64()
        self._check(self._calls.pds_arena_oldest(self._handle, num_bytes, num_values, byref(age)))
        return age.value / 1e9 if age.value >= 0 else None

    def make_room(self, keys: Sequence[str], kinds: bytes, sizes: Sequence[int]) -> bool:
        """Evicts blocks and tails, even leased ones, until these values have room; False if not."""
        values = joined(keys), kinds, (c_int64 * len(keys))(*sizes), len(keys)
        code = self._calls.pds_arena_make_room(self._handle, *values)
        if code != abi.Code.FULL:
            self._check(code)
        return bool(code == abi.Code.OK)

    def use(self, keys: Sequence[str]) -> None:
        """Counts a use of those keys that are stored, of the last first; leases nothing."""
        self._check(self._calls.pds_arena_use(self._handle, joined(keys), len(keys)))

    def values(self) -> Iterator[tuple[str, int, float | None]]:
        """Yields each value's key, bytes and seconds since its last use, in no fixed order.

        The seconds are None if the stored time of use is impossible. The call gives up the arena's
        lock after every 512 values.
        """
        page = (abi.ArenaValue * _PAGE_VALUES)()
        following = c_int64(0)
        count = c_int64()
        while following.value >= 0:
            out = byref(following), page, _PAGE_VALUES, byref(count)
            self._check(self._calls.pds_arena_list(self._handle, *out))
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
        """Copies in values that are not stored yet; returns how many leading ones are there now."""
        count = len(keys)
        done = c_int64()
        sources = (c_uint64 * count)(*addresses)
        lengths = (c_int64 * count)(*sizes)
        values = memory, joined(keys), kinds, sources, lengths, count, byref(done)
        code = self._calls.pds_arena_put(self._handle, -1, *values)
        self._check(code, done.value)
        return done.value

    def get(
        self,
        memory: int,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        keeps_leases: bool = False,
    ) -> int:
        """Copies values out of the arena; returns how many leading values it copied.

        keeps_leases: False if the values' leases end soon, as whoever waited has read them.
        """
        count = len(keys)
        done = c_int64()
        targets = (c_uint64 * count)(*addresses)
        lengths = (c_int64 * count)(*sizes)
        values = memory, joined(keys), targets, lengths, count, keeps_leases, byref(done)
        code = self._calls.pds_arena_get(self._handle, *values)
        self._check(code, done.value)
        return done.value

    def fill(self, batches: Sequence[ValueBatch], memory: int, kinds: bytes) -> Filled:
        """Stores the values of all batches as `ArenaStore.fill` says.

        batches: at least one; all with the same engine.
        kinds: one byte for each value, over all batches: PDS_BLOCK, PDS_SHORT_LIVED or PDS_FOREVER.
        Raises LayoutError or SwapError.
        """
        counts = [batch.num_values for batch in batches]
        is_new = (c_uint8 * sum(counts))()
        num_done = c_int64()
        fill = self._calls.pds_arena_fill
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
        """Starts a scatter as `ArenaStore.start_scatter` does; waits up to 20 ms for the lock."""
        handle = c_void_p()
        values = byref(batch.values(memory))
        with batch.engine.lent() as engine:
            code = checked(self._calls.pds_arena_take, self._handle, engine, values, byref(handle))
        return None if code else Ticket(self.library, handle)

    def confirm(self, copies: Ticket) -> tuple[int, int]:
        """Returns how many leading values have kept their slots, and how many were copied right.

        copies: a ticket of `start_scatter` whose copies have ended.
        """
        there = c_int64()
        right = c_int64()
        out = byref(there), byref(right)
        self._check(self._calls_holding_gil.pds_arena_confirm(self._handle, copies.handle, *out))
        return there.value, right.value

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Waits until the arena's count of publications differs from `seen`; returns the count."""
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


# else a forked child would have the file open, and hold its parent's locks after that has died
os.register_at_fork(after_in_child=_close_all)


def format_arena(library: Library, fd: int, num_bytes: int, slab_bytes: int, seed: int) -> None:
    """Turns an empty file into an arena; no other process may have the file open.

    num_bytes: bytes of memory for values, a multiple of `slab_bytes`.
    seed: a random number with which this arena hashes its keys.
    Raises ValueError for sizes that no arena may have, OSError if the file system refuses.
    """
    code = library.calls.pds_arena_format(fd, num_bytes, slab_bytes, seed)
    if code == abi.Code.ARGUMENT:
        raise ValueError(f"no arena has {num_bytes} bytes in slabs of {slab_bytes}")
    if code:
        raise OSError("the file system refuses to make the file so large")
