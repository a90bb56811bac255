"""PoolDirectory: where a file store's values lie on disk, and where unfinished ones are written.

<root>/pool.lock                marks a pool; the process that holds this file's flock may evict;
                                its modification time is the file system's time, asked by touching;
                                it holds the budget and the lease of the process that scanned last
<root>/<00..ff>/<key>           a value's bytes; the file's modification time is its lease's end
<root>/tmp/<pid>-<random>-<n>   a value that is being written
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError, StoreDenied
from pdstore.format.keys import BlockKey
from pdstore.native.library import Library
from pdstore.store.file.clock import FileSystemClock
from pdstore.store.file.mount import FULL, check_abilities

FAN_OUT = 256
_POOL_LOCK = "pool.lock"
_MAX_TERMS = 200
_ABANDONED_NS = 600 * 10**9  # an unfinished value that is older has no writer any more
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_VALUE = re.compile("pds1:.+")
_UNFINISHED = re.compile("[0-9]+-[0-9a-f]{16}-[0-9]+(-[0-9]+)?(:[01])?")
_PIPE = re.compile(r"\.?[0-9a-z]+-[0-9]+-[0-9a-f]{8}")  # of earlier versions
_OF_MOUNTS = (".nfs", ".fuse_hidden")  # deleted files that a process of this host has open
_NOT_OURS = frozenset({"lost+found"})  # a new file system may contain it


class StoredFile(NamedTuple):
    """A value on disk, as it was when it was listed.

    mtime_ns: the end of its lease. atime_ns: its last use.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    atime_ns: int


class PoolDirectory:
    """A pool's directory on disk. The constructor makes the directories that are missing.

    It never lists or deletes anything behind a symbolic link. Raises ConfigError for a path that
    cannot be a pool, StoreDenied for a directory of another user.

    clock: the time of its file system, by which leases and uses are counted.
    built: returns the native library, or None. It lists and deletes many files in one call, because
      a thread that waits for the GIL once a file slows an engine's thread down.
    """

    def __init__(self, root: Path, built: Callable[[], Library | None] = lambda: None) -> None:
        self.root = root
        self._built = built
        self._places = [f"{root}/{n:02x}" for n in range(FAN_OUT)]
        self._tmp = root / "tmp"
        self._writer = f"{self._tmp}/{os.getpid()}-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self.clock = FileSystemClock(self._touch)
        try:
            self._check_root()
            self.repair()
            check_abilities(root, self.temporary(), self.clock.now_ns)
        except OSError as error:
            if error.errno not in FULL:  # else calls fail until there is room for its directories
                raise

    def path(self, key: BlockKey) -> str:
        """Returns where a key's value is, or would be."""
        return f"{self._places[zlib.crc32(key.encode()) % FAN_OUT]}/{key}"

    def temporary(self) -> str:
        """Returns a new path for an unfinished value; the caller may append "-" and a number."""
        return f"{self._writer}-{next(self._numbers)}"

    def delete(self, key: BlockKey) -> None:
        """Deletes a value; a missing value is no error."""
        _delete(self.path(key))

    def move_away(self, path: str) -> bool:
        """Takes a value that cannot be read out of the way; returns whether that worked.

        It stays among the unfinished values until `sweep` deletes it.
        """
        try:
            os.rename(path, self.temporary())
        except OSError:
            with contextlib.suppress(OSError):
                _delete(path)
        return not os.path.lexists(path)

    def delete_all(self, prefix: str) -> None:
        """Deletes all values whose keys begin with `prefix`."""
        for place in self._places:
            for name in _names(place):
                if name.startswith(prefix):
                    _delete(f"{place}/{name}")

    def files(self) -> Iterator[StoredFile]:
        """Yields all values, in no order; a value deleted before the end may be left out.

        What cannot be looked at is left out, too; if that is all that is there, raises OSError.
        """
        errors: list[OSError] = []
        is_any = False
        for place in self._places:
            for file in self._listed(place, errors):
                is_any = True
                yield file
        if errors and not is_any:
            raise errors[0]

    def lease_ends(self, paths: Sequence[str]) -> list[int]:
        """Returns the end of each value's last lease in nanoseconds; 0 for a missing value."""
        return [mtime_ns if size >= 0 else 0 for size, mtime_ns, _ in self._facts(paths)]

    def delete_unchanged(self, files: Sequence[StoredFile]) -> list[int]:
        """Deletes values. Returns an errno for each, or 0; EBUSY: leased since the listing."""
        library = self._built()
        if library is not None:
            return library.delete_files([f.path for f in files], [f.mtime_ns for f in files])
        return [_delete_unchanged(file) for file in files]

    def repair(self) -> None:
        """Makes the directories that were not made yet, or that somebody has deleted."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        unlock(try_lock(f"{self.root}/{_POOL_LOCK}"))
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._tmp, 0o700)
        if not stat.S_ISDIR(os.lstat(self._tmp).st_mode):
            raise ConfigError(f"{self._tmp} is a link or a file: make it a directory")

    def lock(self) -> int | None:
        """Returns the evictor's lock as a file descriptor for `unlock`; None if others hold it."""
        try:
            return try_lock(f"{self.root}/{_POOL_LOCK}")
        except FileNotFoundError:
            self.repair()
            return try_lock(f"{self.root}/{_POOL_LOCK}")

    def terms(self) -> str:
        """Returns the terms of the process that scanned last; "" if none has."""
        with contextlib.suppress(OSError), open(f"{self.root}/{_POOL_LOCK}", "rb") as lock:
            return lock.read(_MAX_TERMS).decode("ascii", "replace")
        return ""

    def exchange_terms(self, lock: int, mine: str) -> str:
        """Returns the stored terms, as `terms` does; then stores `mine` if they differ.

        lock: as `lock` returned it.
        """
        try:
            theirs = os.pread(lock, _MAX_TERMS, 0).decode("ascii", "replace")
            if theirs != mine:
                os.ftruncate(lock, os.pwrite(lock, mine.encode("ascii"), 0))
        except OSError:  # on a full disk
            return ""
        return theirs

    def _touch(self) -> int:
        """Has the file system stamp `pool.lock`; returns the time that it wrote.

        This also keeps the file from programs that delete what nobody has touched for days.
        """
        path = f"{self.root}/{_POOL_LOCK}"
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            self.repair()
            os.utime(path, follow_symlinks=False)
        return os.lstat(path).st_mtime_ns

    def sweep(self) -> None:
        """Deletes unfinished values that are so old that their writers must be dead.

        A file's age is the time from its own last change to its directory's last change, because
        the same clock wrote these two times. If a suspended writer goes on after its file was
        deleted, it writes the value again.
        """
        with contextlib.suppress(FileNotFoundError):
            oldest = os.lstat(self._tmp).st_mtime_ns - _ABANDONED_NS
            for file in self._listed(str(self._tmp), []):
                if file.mtime_ns < oldest:
                    _delete(file.path)

    def _listed(self, folder: str, errors: list[OSError]) -> Iterator[StoredFile]:
        """Yields a folder's files. What cannot be looked at adds an error instead."""
        try:
            names = _names(folder)
        except OSError as error:
            errors.append(error)
            return
        paths = [f"{folder}/{name}" for name in names]
        facts = self._facts(paths)
        for path, name, (size, mtime_ns, atime_ns) in zip(paths, names, facts, strict=True):
            if size < 0 < mtime_ns:
                errors.append(OSError(mtime_ns, os.strerror(mtime_ns), path))
            elif size >= 0:
                yield StoredFile(path, name, size, mtime_ns, atime_ns)

    def _facts(self, paths: Sequence[str]) -> Iterator[tuple[int, int, int]]:
        library = self._built()
        return map(_facts_of, paths) if library is None else library.stat_files(paths)

    def _check_root(self) -> None:
        root = self.root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"file://{root} is not a directory: name another one") from error
        status = root.stat()
        inside = f"file://{root}/pool"
        if status.st_uid != os.geteuid():
            where = f"a folder in it, {inside}" if os.access(root, os.W_OK) else "another directory"
            raise StoreDenied(
                f"file://{root} belongs to user {status.st_uid}, not to {os.geteuid()}:"
                f" chown it, or name {where}"
            )
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise StoreDenied(
                f"file://{root} can be written by other users:"
                f" chmod 700 it, or name a folder in it, {inside}"
            )
        names = set(os.listdir(root)) - _NOT_OURS
        other = self._other_file(names) if names and _POOL_LOCK not in names else None
        if other is not None:
            raise ConfigError(
                f"file://{root} holds other files ({other}) and is no pool:"
                " name an empty or a new directory, because old values are deleted from it"
            )

    def _other_file(self, names: Collection[str]) -> str | None:
        """Returns a file that no pool has; None in a pool whose `pool.lock` somebody deleted.

        Programs that delete old files have left only those that were in use.
        """
        places = {os.path.basename(place) for place in self._places}
        patterns = {**dict.fromkeys(places, _VALUE), "tmp": _UNFINISHED, "bells": _PIPE}
        for name in sorted(names):
            folder = self.root / name
            if name not in patterns or not stat.S_ISDIR(folder.lstat().st_mode):
                return name
            for inside in _names(str(folder)):
                if not patterns[name].fullmatch(inside) and not inside.startswith(_OF_MOUNTS):
                    return f"{name}/{inside}"
        return None if places & set(names) else min(names)


def _delete(path: str) -> None:
    """Deletes a file, or an empty directory in its place; any other directory stays."""
    with contextlib.suppress(FileNotFoundError):  # somebody else has deleted it
        try:
            os.unlink(path)
        except IsADirectoryError:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _delete_unchanged(file: StoredFile) -> int:
    # evictor: lists the file;                 reads its times again; deletes it
    # D:                        its match leases the file
    # So a lease after the listing keeps the file. A lease in the moment between the last two steps
    # is lost: D's get misses the block, and D computes it.
    with contextlib.suppress(OSError):  # an NFS client asks its server about a file that is opened
        os.close(os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        if os.lstat(file.path).st_mtime_ns != file.mtime_ns:
            return errno.EBUSY
        os.unlink(file.path)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _facts_of(path: str) -> tuple[int, int, int]:
    """Returns what `Library.stat_files` returns for a file."""
    try:
        status = os.lstat(path)
    except OSError as error:
        why = error.errno or errno.EIO
        return -1, 0 if why in (errno.ENOENT, errno.ENOTDIR) else why, 0
    if stat.S_ISDIR(status.st_mode):
        return -1, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_atime_ns


def _names(path: str) -> list[str]:
    """Returns the names in a directory; none if the path is a link, a file or missing."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return []
        raise
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)


def try_lock(path: str) -> int | None:
    """Locks a file; returns a file descriptor for `unlock`, or None if others hold the lock.

    Raises ConfigError on a file system without flock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"the file system of {path} has no flock ({error.strerror}):"
            " mount it with locks, or name a directory on another one"
        ) from error
    return fd


def unlock(lock: int | None) -> None:
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may keep it open after the close
        os.close(lock)
