"""An open arena of libpdstore: values by key in a file that several processes map."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

from pdstore.errors import (
    StoreClosed,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.native.abi import ArenaInfo, ArenaOptions, ArenaValue, Code, SlotCounts
from pdstore.native.arena_times import ArenaTimes
from pdstore.native.library import Library
from pdstore.native.slot_arrays import SlotArrays

_SHORT_BATCH = 64
_PATIENCE_NS = 50_000
_PAGE_VALUES = 512
_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    Code.CLOSED: (StoreClosed, "is closed, or belongs to the parent process"),
    Code.TIMEOUT: (StoreTimeout, "is locked: a process that has it open does not go on"),
    Code.FULL: (StoreFull, "has no room: all values are leased, or this one is too large"),
    Code.FORMAT: (
        StoreUnavailable,
        "is no arena of this version and this boot, or damaged: remove it",
    ),
    Code.SYSTEM: (StoreUnavailable, "cannot be mapped"),
    Code.MEMORY: (StoreUnavailable, "finds no memory in this process"),
    Code.LENGTH: (WrongLength, "has a value of another length"),
}


class ArenaCounts(NamedTuple):
    """Numbers of an arena's slots by their state, and of the slabs that are cut into slots."""

    stored: int
    reserved: int
    resting: int
    free: int
    slabs: int


class NativeArena:
    """An open arena. Any thread may call it; a call fails with a StoreError.

    fd: of the file; stays the caller's.
    label: begins the errors' messages.
    Raises StoreUnavailable for a file that is no arena, StoreFull if too many have it open.
    """

    def __init__(self, library: Library, fd: int, times: ArenaTimes, label: str) -> None:
        self._label = label
        self._handle = c_void_p()
        self.library = library
        self._calls, self._short_calls = library.calls, library.short_calls
        options = ArenaOptions(*[int(seconds * 1e9) for seconds in times])
        info = ArenaInfo()
        code = self._calls.pds_arena_open(fd, byref(options), byref(self._handle), byref(info))
        self._check(code)
        self.data_at, self.data_bytes = int(info.data_at), int(info.data_bytes)
        self.slab_bytes = int(info.slab_bytes)
        _forget_in_forked_children()
        _open_arenas.add(self)

    @property
    def handle(self) -> c_void_p:
        """The arena, for other calls of the library."""
        return self._handle

    def close(self) -> None:
        """Ends it for this process; running calls end first. Twice is fine."""
        self._calls.pds_arena_close(self._handle)

    def forget(self) -> None:
        """Ends it in the child of a fork, where it is the parent's."""
        self._calls.pds_arena_forget(self._handle)

    def __del__(self) -> None:
        if self._handle:
            self._calls.pds_arena_free(self._handle)

    def match(self, keys: Sequence[str]) -> int:
        """Leases the values of the first keys that are stored; returns how many."""
        found = c_int64()
        self._check(self._short("match", len(keys), text_of(keys), len(keys), byref(found)))
        return found.value

    def which(self, keys: Sequence[str]) -> list[bool]:
        """Returns for each key whether it is stored; leases nothing."""
        stored = (c_uint8 * len(keys))()
        self._check(self._short("which", len(keys), text_of(keys), len(keys), stored))
        return list(map(bool, bytes(stored)))

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets values, leased or not."""
        self._check(self._calls.pds_arena_remove(self._handle, text_of(keys), len(keys)))

    def clear(self, prefix: str) -> None:
        """Forgets every value whose key begins so; the prefix is not empty."""
        self._check(self._calls.pds_arena_clear(self._handle, prefix.encode()))

    def counts(self) -> ArenaCounts:
        """Counts the slots; it looks at all of them."""
        counts = SlotCounts()
        self._check(self._calls.pds_arena_count(self._handle, byref(counts)))
        return ArenaCounts(*(getattr(counts, name) for name in ArenaCounts._fields))

    def values(self) -> Iterator[tuple[str, int, float | None]]:
        """Yields key, bytes and seconds since the last use of each value, in no order.

        The age is None for a time that cannot be. The lock is held for one page at a time.
        """
        page, following, count = (ArenaValue * _PAGE_VALUES)(), c_int64(0), c_int64()
        while following.value >= 0:
            self._check(
                self._calls.pds_arena_list(
                    self._handle, byref(following), page, _PAGE_VALUES, byref(count)
                )
            )
            for value in page[: count.value]:
                age_s = value.age_ns / 1e9 if value.age_ns >= 0 else None
                yield value.key.decode("ascii", "replace"), value.bytes, age_s

    def reserve(
        self, keys: Sequence[str], kinds: bytes, sizes: Sequence[int]
    ) -> tuple[SlotArrays, int]:
        """Reserves slots for values that are not stored.

        kinds: `kinds[i]` is PDS_BLOCK, PDS_SHORT_LIVED or PDS_FOREVER.
        Returns a slot for each key, -1 where it is stored, and how many of the first keys are
        covered. Raises StoreFull where it is none.
        """
        count, covered = len(keys), c_int64()
        arrays, lengths = SlotArrays(count), (c_int64 * count)(*sizes)
        self._check(
            self._calls.pds_arena_reserve(
                self._handle, text_of(keys), kinds, lengths, count, *arrays.all, byref(covered)
            )
        )
        return arrays, covered.value

    def publish(self, arrays: SlotArrays, count: int) -> int:
        """Makes the first `count` reserved slots findable; returns how many of the first are."""
        done = c_int64()
        code = self._short("publish", count, arrays.slots, arrays.generations, count, byref(done))
        self._check(code, done.value)
        return done.value

    def abandon(self, arrays: SlotArrays) -> None:
        """Gives back the reserved slots that are not published."""
        self._check(
            self._short("abandon", arrays.count, arrays.slots, arrays.generations, arrays.count)
        )

    def borrow(self, keys: Sequence[str], sizes: Sequence[int]) -> tuple[SlotArrays, int]:
        """Leases and finds the values of the first keys; returns their slots and how many.

        Raises WrongLength at a value that has not exactly `sizes[i]` bytes.
        """
        count, found = len(keys), c_int64()
        arrays, lengths = SlotArrays(count), (c_int64 * count)(*sizes)
        code = self._short(
            "borrow", count, text_of(keys), lengths, count, *arrays.all, byref(found)
        )
        self._check(code, found.value)
        return arrays, found.value

    def still_there(self, arrays: SlotArrays, count: int) -> int:
        """Returns how many of the first slots hold what they held when they were borrowed."""
        still = c_int64()
        code = self._short_calls.pds_arena_still_there(
            self._handle, arrays.slots, arrays.generations, count, byref(still)
        )
        self._check(code)
        return still.value

    def put(
        self,
        memory: int,
        keys: Sequence[str],
        kinds: bytes,
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        at_once: bool = False,
    ) -> int:
        """Copies values in, unless they are stored; returns how many of the first it took.

        memory: where this process has mapped the arena's memory.
        at_once: take none where somebody holds the lock.
        """
        count, done = len(keys), c_int64()
        sources, lengths = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        values = memory, text_of(keys), kinds, sources, lengths, count, byref(done)
        if at_once:
            code = self._short_calls.pds_arena_put(self._handle, _PATIENCE_NS, *values)
        else:
            code = self._calls.pds_arena_put(self._handle, -1, *values)
        if not at_once or code != Code.TIMEOUT:
            self._check(code, done.value)
        return done.value

    def get(
        self, memory: int, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """Copies the values of the first keys out; returns how many were there."""
        count, done = len(keys), c_int64()
        targets, lengths = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        code = self._calls.pds_arena_get(
            self._handle, memory, text_of(keys), targets, lengths, count, byref(done)
        )
        self._check(code, done.value)
        return done.value

    def wait(self, seen: int, timeout_s: float) -> int:
        """Waits until the count of publications is not `seen`; returns the count."""
        changes = c_uint32()
        timeout_us = int(max(timeout_s, 0.0) * 1e6)
        self._check(self._calls.pds_arena_wait(self._handle, seen, timeout_us, byref(changes)))
        return changes.value

    def _short(self, verb: str, count: int, *args: object) -> int:
        """Makes a call that is over at once unless somebody holds the lock; returns its code.

        Such a call keeps Python's lock, which a busy engine gives back late. Long batches, and a
        call that has to wait, do without.
        """
        name, code = f"pds_arena_{verb}", int(Code.TIMEOUT)
        if count <= _SHORT_BATCH:
            code = getattr(self._short_calls, name)(self._handle, _PATIENCE_NS, *args)
        if code == Code.TIMEOUT:
            code = getattr(self._calls, name)(self._handle, -1, *args)
        return code

    def _check(self, code: int, num_done: int = 0) -> None:
        if code == Code.OK:
            return
        if code == Code.ARGUMENT:
            raise ValueError(f"{self._label}: the library refuses an argument")
        error, why = _ERRORS[code]
        raise error(f"{self._label} {why}", num_done=num_done)


_open_arenas: weakref.WeakSet[NativeArena] = weakref.WeakSet()


@cache
def _forget_in_forked_children() -> None:
    """A child that kept the file open would keep its parent's locks after the parent's death."""
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for arena in list(_open_arenas):
        arena.forget()


def text_of(keys: Sequence[str]) -> bytes:
    """Returns keys as the library takes them."""
    return ("\0".join(keys) + "\0").encode()
