"""FileStore: a file per block in one directory that P and D share; the default, nothing to run."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from pathlib import Path

from pydantic import ByteSize

from pdstore.environment import default_pool_directory
from pdstore.errors import (
    ConfigError,
    PDStoreError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.block import HEADER_BYTES, checksum
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import prefix_of
from pdstore.native.abi import OTHER_LENGTH
from pdstore.native.library import Library, address_of, load_library
from pdstore.settings import Settings
from pdstore.store.base import Lifecycle, Slots, Store, check_call
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.eviction import MAX_LEASE_S, Evictor
from pdstore.store.url import StoreURL

log = logging.getLogger(__name__)

DEFAULT_LEASE_S = 10.0
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo that somebody put there cannot hang us

_ERRORS: dict[int, type[StoreError]] = {
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.ETIMEDOUT: StoreTimeout,
}
_NO_VALUE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})  # not a regular file


class FileStore(Store):
    """`file:///dir?budget=20GiB&lease=10`, or `file://` for a directory of this user.

    Any number of processes and hosts may share the directory; all give the same lease. A value is
    written under a temporary name and linked to its key's when it is whole, so that a crash of its
    writer leaves nothing to be found; there is no fsync, because a cache need not outlive the
    machine. A value's modification time is its lease's end and its age: one utime is the lookup,
    the lease and the use. Tails and markers go after `PDSTORE_HANDOFF_TTL_S`, blocks when the
    budget needs their room.

    library: gives the native library, which sums values while it reads them, or None to do that in
      Python; called at the first use.

    Constructing makes the directory. Raises ConfigError or StoreDenied for one that cannot be used.
    """

    def __init__(
        self,
        root: Path,
        *,
        budget: int | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        handoff_ttl_s: float = 600.0,
        library: Callable[[], Library | None] = lambda: None,
    ) -> None:
        self.label = f"file://{root}"
        if not lease_s <= MAX_LEASE_S:
            raise ConfigError(f"{self.label}: lease must be at most {MAX_LEASE_S:g} seconds")
        self._lifecycle = Lifecycle(self.label)
        self._lease_s = lease_s
        self._library = library
        try:
            self._directory = PoolDirectory(root)
            self._directory.sweep()
            self._evictor = Evictor(self._directory, budget, handoff_ttl_s)
        except PDStoreError:  # some of them are OSErrors too
            raise
        except OSError as error:
            raise self._error(error, "name a directory that this user may write to") from error
        log.info(
            "pool in %s, budget %s: P and D must use the same directory",
            root,
            ByteSize(self._evictor.budget).human_readable(),
        )

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> FileStore:
        if url.host or url.path == "/":
            raise ConfigError(
                f"{url.label}: write file:///an/absolute/directory,"
                f" or file:// for {default_pool_directory()}"
            )
        budget = url.size("budget", 0) or None
        lease_s = url.seconds("lease", DEFAULT_LEASE_S)
        url.finish("budget, lease")
        root = Path(url.path) if url.path else default_pool_directory()
        return cls(
            root,
            budget=budget,
            lease_s=lease_s,
            handoff_ttl_s=settings.handoff_ttl_s,
            library=partial(load_library, settings, for_gpu=False),
        )

    @property
    def lease_s(self) -> float:
        return self._lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._lifecycle.check()
        check_call(keys)
        now, n = time.time_ns(), 0
        times = (now, now + int(self._lease_s * 1e9))
        try:
            for key in keys:
                os.utime(self._directory.path(key), ns=times, follow_symlinks=False)
                n += 1
        except FileNotFoundError:
            return n
        except OSError as error:
            raise self._error(error, keys[n], n) from error
        return n

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        spare, n = bytearray(1), 0
        try:
            for key in keys:
                num_bytes = _read(self._directory.path(key), slots.value(n), spare)
                if num_bytes != slots.sizes[n]:
                    raise self._other_length(keys, slots, n)
                n += 1
        except FileNotFoundError:
            return n
        except OSError as error:
            raise self._error(error, keys[n], n) from error
        return n

    def get_with_checksums(
        self, keys: Sequence[BlockKey], slots: Slots, checksums: MutableSequence[int]
    ) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        if min(slots.sizes, default=HEADER_BYTES) < HEADER_BYTES:
            raise ValueError(f"a value of fewer than {HEADER_BYTES} bytes has no checksum")
        library = self._library() if keys else None
        if library is None:
            return self._get_then_sum(keys, slots, checksums)
        paths = [self._directory.path(key) for key in keys]
        base = address_of(slots.view)
        addresses = [base + number * slots.slot_bytes for number in slots.numbers]
        sums, why = library.read_files(paths, addresses, slots.sizes)
        n = len(sums)
        checksums[:n] = sums
        if why == OTHER_LENGTH:
            raise self._other_length(keys, slots, n)
        if why not in (0, errno.ENOENT):
            raise self._error(OSError(why, os.strerror(why)), keys[n], n)
        return n

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._lifecycle.check()
        check_call(keys, slots)
        n, was_stored = 0, True  # look before the first write, then as long as that finds something
        try:
            for key in keys:
                path = self._directory.path(key)
                was_stored = was_stored and os.access(path, os.F_OK)
                if not was_stored:
                    if not self._evictor.admit(slots.sizes[n]):
                        raise StoreFull(f"{self.label}: all is leased: {key}", num_done=n)
                    was_stored = not self._write_or_repair(path, slots.value(n))
                n += 1
        except PDStoreError:
            raise
        except OSError as error:
            raise self._error(error, keys[n], n) from error
        return n

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._lifecycle.check()
        check_call(keys)
        n = 0
        try:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._directory.path(key))
                n += 1
        except OSError as error:
            raise self._error(error, keys[n], n) from error
        self._evictor.look_again()

    def clear(self, namespace: str) -> None:
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        try:
            for path in self._directory.paths(prefix):
                with contextlib.suppress(FileNotFoundError):  # evicted or removed meanwhile
                    os.unlink(path)
        except OSError as error:
            raise self._error(error, f"clear of {prefix}") from error
        self._evictor.look_again()

    def close(self) -> None:
        if self._lifecycle.end():
            self._directory.close()

    def _get_then_sum(
        self, keys: Sequence[BlockKey], slots: Slots, checksums: MutableSequence[int]
    ) -> int:
        n = 0
        try:
            n = self.get(keys, slots)
        except StoreError as error:
            n = error.num_done
            raise
        finally:
            checksums[:n] = [checksum(slots.value(i)) for i in range(n)]
        return n

    def _write_or_repair(self, path: str, piece: memoryview) -> bool:
        """As `_write`, once more after making room on a full disk or a directory that is gone."""
        try:
            return self._write(path, piece)
        except FileNotFoundError:
            self._lifecycle.check()
            self._directory.repair()
        except OSError as error:
            if _ERRORS.get(error.errno or 0) is not StoreFull:
                raise
            self._evictor.make_room(len(piece))
        return self._write(path, piece)

    def _write(self, path: str, piece: memoryview) -> bool:
        """Stores a value; False if its key is stored already."""
        temporary = self._directory.temporary()
        fd = os.open(temporary, _CREATE, 0o600)
        try:
            try:
                done = os.write(fd, piece)
                while done < len(piece):
                    done += os.write(fd, piece[done:])
            finally:
                os.close(fd)
            self._directory.make_place(path)
            os.link(temporary, path)  # not a rename, which would replace what is stored
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True

    def _other_length(self, keys: Sequence[BlockKey], slots: Slots, n: int) -> WrongLength:
        return WrongLength(f"{self.label}: {keys[n]} has not {slots.sizes[n]} bytes", num_done=n)

    def _error(self, error: OSError, what: str, num_done: int = 0) -> StoreError:
        number = error.errno or 0
        kind = WrongLength if number in _NO_VALUE else _ERRORS.get(number, StoreUnavailable)
        return kind(f"{self.label}: {error.strerror}: {what}", num_done=num_done)


def _read(path: str, piece: memoryview, spare: bytearray) -> int:
    """Reads a value into its slot; returns its length, or something above the slot's.

    `spare` is one byte more, which only a longer value reaches: a look at the length is saved.
    """
    fd = os.open(path, _READ)
    try:
        done = more = os.readv(fd, [piece, spare])
        while more and done < len(piece):
            more = os.readv(fd, [piece[done:], spare])
            done += more
        return done
    finally:
        os.close(fd)
