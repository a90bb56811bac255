"""Budget: how many bytes a pool of files may have; grows with the disk's free room by default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ByteSize

from pdstore.errors import ConfigError
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.mount import Doubt

DEFAULT_BUDGET = 20 << 30
_SMALL = 1 << 30
_PAGE = 4096  # a file's space on disk is a multiple of it
_RETRY_INTERVAL_S = 1.0


class Budget:
    """The bytes that a pool may have.

    A default budget below 20 GiB grows when the disk has more room than at the start, when other
    files filled it. It never shrinks: a disk that others fill is noticed by the puts.

    num_bytes: None takes the default. Raises ConfigError if the file system does not tell its size.

    attainable: the bytes that the file system can give the pool, at most `num_bytes`.
    """

    def __init__(
        self,
        directory: PoolDirectory,
        num_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._is_default = num_bytes is None
        self._looked_until = 0.0
        self.num_bytes = default_budget(directory) if num_bytes is None else num_bytes
        self.attainable = self.num_bytes
        if not self._is_default:
            self.measure()

    def __str__(self) -> str:
        return "default" if self._is_default else _readable(self.num_bytes)

    @property
    def step(self) -> int:
        """The bytes of puts after which the pool is scanned."""
        return self.num_bytes // 20

    @property
    def goal(self) -> int:
        """The bytes that an eviction leaves."""
        return self.num_bytes * 9 // 10

    def measure(self) -> None:
        """Asks the file system again for what is attainable."""
        self.attainable = min(self.num_bytes, room_of(self._directory, self.num_bytes))

    def grow(self, own: int) -> None:
        """Raises a default budget if the disk has more room now.

        own: the pool's bytes on disk.
        """
        if self._is_default and self.num_bytes < DEFAULT_BUDGET:
            default = _default_within(free_bytes(self._directory.root) + own)
            if default > self.num_bytes:
                self.num_bytes = self.attainable = default

    def may_hold(self, num_bytes: int) -> bool:
        """Returns whether the budget is at least so many bytes, if need be after it has grown."""
        if num_bytes <= self.num_bytes:
            return True
        if self._is_default and self._clock() >= self._looked_until:
            self._looked_until = self._clock() + _RETRY_INTERVAL_S
            self.grow(sum(on_disk(file.size) for file in self._directory.files()))
        return num_bytes <= self.num_bytes

    def why_full(self, num_bytes: int) -> tuple[str, str]:
        """Returns why a value of so many bytes was not admitted, and what to change."""
        if on_disk(num_bytes) <= self.num_bytes:
            return "all is leased", "raise ?budget=, or shorten ?lease="
        if self._is_default:
            free = _readable(free_bytes(self._directory.root))
            return f"the disk is full ({free} are free)", "free some of it"
        message = f"a value of {num_bytes:,} bytes is more than ?budget={_readable(self.num_bytes)}"
        return message, "write a larger one with its unit, like ?budget=20GiB"

    def why_too_long(self, num_bytes: int) -> str | None:
        """Returns why no value of so many bytes can be stored, and what to write; None if it can.

        A disk that is only full now is no reason.
        """
        if num_bytes <= self.num_bytes:
            return None
        if not self._is_default:
            return (
                f"a value of {num_bytes:,} bytes is more than ?budget={_readable(self.num_bytes)}:"
                " write a larger one with its unit, like ?budget=20GiB"
            )
        total = _total_bytes(self._directory.root)
        if num_bytes <= total // 2:
            return None
        return (
            f"a value of {num_bytes:,} bytes is more than half of its file system, which has"
            f" {_readable(total)}: name a directory on a larger one (for /dev/shm: docker's"
            " --shm-size)"
        )

    def doubts(self) -> Iterator[Doubt]:
        """Yields a doubt if the file system has less than the budget, or is full."""
        if self.attainable < self.num_bytes:
            message = f"?budget={_readable(self.num_bytes)}, and its file system has"
            less = _readable(self.attainable * 9 // 10)
            yield Doubt(
                "budget",
                f"{message} {_readable(self.attainable)}",
                f"write ?budget={less}, or use a larger one (for /dev/shm: docker's --shm-size)",
            )
        total = _total_bytes(self._directory.root)
        if self._is_default and self.num_bytes < min(total // 20, _SMALL):
            free = _readable(free_bytes(self._directory.root))
            yield Doubt(
                "budget",
                f"the disk is full: {free} of {_readable(total)} are free, so the pool has"
                f" {_readable(self.num_bytes)}",
                "free some of it: the pool then grows by itself; or name another directory",
            )


def default_budget(directory: PoolDirectory) -> int:
    """Returns 20 GiB, or half of the bytes that `room_of` counts if that half is less.

    Raises ConfigError if the file system does not tell how large it is.
    """
    if not _total_bytes(directory.root):
        raise ConfigError(
            f"the file system of {directory.root} does not tell how large it is: write how many"
            " bytes the pool may have, like ?budget=20GiB"
        )
    return _default_within(room_of(directory, 2 * DEFAULT_BUDGET))


def room_of(directory: PoolDirectory, enough: int) -> int:
    """Returns the file system's free bytes, plus the pool's own unless `enough` bytes are free.

    Returns `enough` if the file system does not tell.
    """
    free = free_bytes(directory.root)
    if free >= enough or not _total_bytes(directory.root):
        return max(free, enough)
    return free + sum(on_disk(file.size) for file in directory.files())


def free_bytes(root: Path) -> int:
    """Returns how many bytes this user may still write to a directory's file system."""
    status = _statvfs(root)
    return status.f_bavail * status.f_frsize


def _total_bytes(root: Path) -> int:
    status = _statvfs(root)
    return status.f_blocks * status.f_frsize


def _statvfs(root: Path) -> os.statvfs_result:
    """Asks about the nearest directory that is there: on a full disk none could be made."""
    there = next((path for path in (root, *root.parents) if path.exists()), root)
    return os.statvfs(there)


def _default_within(room: int) -> int:
    return min(DEFAULT_BUDGET, room // 2)


def on_disk(num_bytes: int) -> int:
    """Returns the bytes that a file of this length takes."""
    return -(-num_bytes // _PAGE) * _PAGE


def _readable(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()
