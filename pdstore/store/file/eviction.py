"""Evictor: keeps a pool's directory within its budget; one process at a time evicts for all."""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence

from pdstore.format.keys import PERMANENT, BlockKey, Kind, kind_of
from pdstore.store.base import FRESH_S
from pdstore.store.file.budget import Budget, on_disk
from pdstore.store.file.directory import PoolDirectory, StoredFile, unlock
from pdstore.store.file.mount import Doubt
from pdstore.threads import Ticker

log = logging.getLogger(__name__)

MAX_LEASE_S = 3600.0
_LOCK_TIMEOUT_S = 0.5  # a put waits so long for another thread's or process's eviction
_LARGE_STEP = 64 << 20  # bytes; a pool of larger steps is scanned by a thread, not by a put
_RETRY_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 1.0
_MAX_OLDEST = 1024
_NUM_NEWEST = 3  # files; a marker needs an inode, and one more if its directory is missing
_EXPECTED = frozenset({0, errno.ENOENT, errno.EBUSY})  # ends of deletions that are no failures
_ALL = 1 << 62  # more bytes than there are
_S = 1_000_000_000


class Evictor:
    """Decides before every put whether there is room, and makes room.

    Each process counts the bytes that it puts, and scans the whole directory after every 5 % of the
    budget, with the directory's lock. It deletes tails and markers that are past their time, and
    then values that are neither leased nor fresh, the least recently used first, until no more than
    90 % of the budget is used. So n processes may exceed the budget by (n - 1) * 10 %, and by more
    if a scan takes as long as the puts of 5 %.

    While a large pool is within its budget, a thread scans it and the puts go on.
    """

    def __init__(
        self,
        directory: PoolDirectory,
        budget: int | None,
        lease_s: float,
        handoff_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self.budget = Budget(directory, budget, clock)
        self._terms = f"budget={self.budget}&lease={lease_s:g}"
        self._has_told = False
        self._lease_ns = int(lease_s * _S)
        self._handoff_ttl_ns = int(handoff_ttl_s * _S)
        self._lock = threading.Lock()
        self._used = 0  # bytes on disk, as far as known, plus the pending bytes
        self._pending = 0  # bytes that are admitted and not settled
        self._put_since_scan = self.budget.num_bytes  # so the first put scans the directory
        self._full_until = 0.0
        self._oldest: list[StoredFile] = []  # the last scan found that these may be evicted next
        self._has_scanned = False
        self._is_closed = False
        self._thread: Ticker | None = None

    def admit(self, sizes: Sequence[int]) -> int:
        """Returns how many leading values have room; counts those as pending until `settle`."""
        if not self.budget.may_hold(on_disk(sizes[0])):
            return 0
        self.admit_anyway(sizes)
        num_admitted = 0
        try:
            excess = self._excess()
            num_admitted = len(sizes)
            while excess > 0 and num_admitted:
                num_admitted -= 1
                excess -= on_disk(sizes[num_admitted])
        finally:
            refused = sum(map(on_disk, sizes[num_admitted:]))
            with self._lock:
                self._used -= refused
                self._pending -= refused
        return num_admitted

    def admit_anyway(self, sizes: Sequence[int]) -> None:
        """Counts values as pending even if they have no room; markers are admitted in this way."""
        num_bytes = sum(map(on_disk, sizes))
        with self._lock:
            self._used += num_bytes
            self._pending += num_bytes
            self._put_since_scan += num_bytes

    def doubts(self) -> Iterator[Doubt]:
        """Yields doubts about the budget, and one if another process has other terms."""
        yield from self.budget.doubts()
        if (theirs := self._directory.terms()) not in ("", self._terms):
            self._has_told = True
            yield Doubt("budget", *self._differ_from(theirs))

    def settle(self, sizes: Sequence[int]) -> None:
        """Says that admitted values are written, or will not be."""
        with self._lock:
            self._pending -= sum(map(on_disk, sizes))

    def age_of_oldest(self, sizes: Sequence[int]) -> float | None:
        """Returns how many seconds ago the value was used that new values would evict first.

        None if the new values have room. None also if every value that the last scan would have
        evicted next was used or deleted since then; in that case the next put scans again.
        """
        if self._used + sum(map(on_disk, sizes)) <= self.budget.goal:
            return None
        for n, file in enumerate(oldest := self._oldest):
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(file.path).st_mtime_ns == file.mtime_ns:
                    self._oldest = oldest[n:]
                    return max(0, self._directory.clock.now_ns() - self._used_at(file)) / _S
        self._put_since_scan = self.budget.num_bytes
        return None

    def make_room(self, num_bytes: int) -> None:
        """Evicts values when the disk is full, even if files of others fill it."""
        if not self._is_known_full():
            self._evict(on_disk(num_bytes), _LOCK_TIMEOUT_S)

    def clear_room(self, sizes: Sequence[int], keep: Collection[str]) -> bool:
        """Evicts values, even leased ones, until new values of these sizes have room.

        keep: names of files that are not evicted. Returns whether the new values have room.
        """
        needed = sum(map(on_disk, sizes))
        self.budget.measure()
        tries = (self._evict(needed, _LOCK_TIMEOUT_S, keep) for _ in range(3))  # others take room
        return any(is_done and self._used + needed <= self.budget.num_bytes for is_done in tries)

    def evict_newest(self) -> None:
        """Deletes the newest three blocks or tails, even fresh ones; leased ones only if it must.

        This makes room for a marker, for which a peer waits, on a disk without free bytes or
        inodes. The newest values are most likely a part of the save that did not fit.
        """
        now = self._directory.clock.measured_ns()
        kinds = (Kind.BLOCK, Kind.TAIL)
        files = [f for f in self._directory.files() if kind_of(BlockKey(f.name)) in kinds]
        files.sort(key=lambda f: (f.mtime_ns > now, -f.mtime_ns))  # leased values come last
        self._directory.delete_unchanged(files[:_NUM_NEWEST])

    def close(self) -> None:
        """Stops the thread that scans, if there is one. May be called twice."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.stop(_JOIN_TIMEOUT_S)

    def expect_room(self) -> None:
        """Notes that calls have deleted values: the next put scans before it is refused."""
        self._full_until = 0.0
        if self._used + self.budget.step > self.budget.num_bytes:
            self._put_since_scan = self.budget.num_bytes

    def _excess(self) -> int:
        """Returns how many bytes the pool exceeds its budget by; scans first if a scan is due.

        While another thread or process evicts, the pool may exceed its budget by one step.
        """
        budget = self.budget.num_bytes
        step = self.budget.step
        with self._lock:
            is_over = self._used > budget
            due = is_over or self._put_since_scan > step
            if due and not is_over and self._has_scanned and step >= _LARGE_STEP:
                self._scan_in_background()
                return 0
            timeout_s = _LOCK_TIMEOUT_S if self._used > budget + step else 0.0
        others_evict = due and not (self._is_known_full() or self._evict(0, timeout_s))
        return self._used - self.budget.num_bytes - (step if others_evict else 0)

    def _scan_in_background(self) -> None:
        """Lets the thread scan once. The next scan is due after another step. Needs `_lock`."""
        self._put_since_scan = 0
        if self._thread is not None:
            self._thread.wake()
        elif not self._is_closed:
            self._thread = Ticker("pdstore-evictor", self._scan)  # it scans at once

    def _scan(self) -> float | None:
        is_done = self._is_known_full() or self._evict(0, _LOCK_TIMEOUT_S)
        return None if is_done else _RETRY_INTERVAL_S

    def _is_known_full(self) -> bool:
        return self._clock() < self._full_until

    def _evict(self, to_free: int, timeout_s: float, keep: Collection[str] = ()) -> bool:
        """Scans and evicts until the budget has room for the values that are pending.

        Deletes at least `to_free` bytes if enough values are neither leased nor fresh. Returns
        False if another thread or process evicts for longer than `timeout_s`.
        keep: if not empty, all other blocks and tails may go for `to_free` new bytes.
        """
        end = time.monotonic() + timeout_s
        while (lock := self._directory.lock()) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)
        start = self._clock()
        began = self._put_since_scan
        try:
            self._compare(self._directory.exchange_terms(lock, self._terms))
            used, freed = self._scan_and_delete(to_free, keep)
        finally:
            unlock(lock)
        with self._lock:
            self._put_since_scan = max(0, self._put_since_scan - began)  # it may have missed these
            self._used = used + self._pending
            self._has_scanned = True
        if self._used > self.budget.num_bytes or (freed < to_free and not keep):
            now = self._clock()
            self._full_until = now + 10 * (now - start)  # else every put to a full pool would scan
        return True

    def _compare(self, theirs: str) -> None:
        """Warns once if another process uses the pool with another budget or lease."""
        if theirs not in ("", self._terms) and not self._has_told:
            self._has_told = True
            label = f"file://{self._directory.root}"
            log.warning("%s: %s: %s", label, *self._differ_from(theirs))

    def _differ_from(self, theirs: str) -> tuple[str, str]:
        return (
            f"another process has, or had, ?{theirs}, and this one has ?{self._terms}",
            "write the same for all: the smallest budget and the shortest lease count for all",
        )

    def _scan_and_delete(self, to_free: int, keep: Collection[str]) -> tuple[int, int]:
        """Scans and deletes; returns how many bytes are left, and how many were deleted."""
        now = self._directory.clock.measured_ns()
        self._directory.sweep()
        used = 0
        expired = []
        candidates = []
        for file in self._directory.files():
            kind = kind_of(BlockKey(file.name))
            if kind in (Kind.TAIL, Kind.HANDOFF) and file.mtime_ns < now - self._handoff_ttl_ns:
                expired.append(file)
                continue
            used += on_disk(file.size)
            is_kept_back = kind is Kind.HANDOFF or file.name in keep
            is_left = is_kept_back if keep else _is_kept(file, now)
            if not is_left and kind not in PERMANENT:
                candidates.append(file)
        self.budget.grow(used)
        expired_ends, _ = self._delete(expired, _ALL)
        freed = expired_ends[0]
        goal = min(self.budget.goal, self.budget.num_bytes - self._pending)
        if keep:
            goal = self.budget.attainable - self._pending - to_free
            if used - sum(on_disk(file.size) for file in candidates) > goal:
                candidates.clear()
        elif freed < to_free:
            goal = min(goal, used - max(to_free - freed, used // 10))
        candidates.sort(key=lambda f: (_is_kept(f, now), f.mtime_ns <= now, self._used_at(f)))
        ends, num_tried = self._delete(candidates, used - goal)
        used, freed = used - ends[0] - ends[errno.ENOENT], freed + ends[0]
        failed = set(ends) - _EXPECTED
        if failed and used > goal and not freed:
            raise OSError(min(failed), os.strerror(min(failed)))
        self._oldest = [] if keep else candidates[num_tried : num_tried + _MAX_OLDEST]
        return used, freed

    def _used_at(self, file: StoredFile) -> int:
        """Returns when a value was last looked up, which leased it, or put: its file system's time.

        The access time would not do: a read moves it, so a chain's last blocks would go last.
        """
        is_leased = file.mtime_ns > file.atime_ns + FRESH_S * _S
        return file.mtime_ns - self._lease_ns * is_leased

    def _delete(
        self, files: Sequence[StoredFile], num_bytes: int
    ) -> tuple[collections.Counter[int], int]:
        """Deletes leading values until so many bytes are freed, by others or here.

        Returns how many bytes of values had each outcome of `delete_unchanged`, and how many values
        were tried.
        """
        ends: collections.Counter[int] = collections.Counter()
        sums = [0, *itertools.accumulate(on_disk(file.size) for file in files)]
        start = 0
        while start < len(files) and (rest := num_bytes - ends[0] - ends[errno.ENOENT]) > 0:
            stop = min(len(files), bisect_left(sums, sums[start] + rest, start + 1))
            part = files[start:stop]
            for file, why in zip(part, self._directory.delete_unchanged(part), strict=True):
                ends[why] += on_disk(file.size)
            start = stop
        return ends, start


def _is_kept(file: StoredFile, now: int) -> bool:
    """True if a value is leased or fresh.

    False for a modification time later than any lease ends: it was set before a clock was set back.
    """
    return now - FRESH_S * _S < file.mtime_ns <= now + MAX_LEASE_S * _S
