"""PoolDirectory: where a file store's values lie on disk, and where unfinished ones are written.

<root>/pool.lock          marks a pool; whoever holds its flock evicts
<root>/<00..ff>/<key>     a value: its whole content, its lease's end as modification time
<root>/tmp/<pid>-<random> a process's unfinished values (`Scratch`)
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
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError, StoreDenied
from pdstore.format.keys import BlockKey

FAN_OUT = 256
_POOL_LOCK = "pool.lock"
_LOCK = "lock"
_SCRATCH_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_EMPTY_S = 60.0
_NOT_OURS = frozenset({"lost+found"})  # an empty file system has it


class StoredFile(NamedTuple):
    """A value on disk, as it was when somebody looked.

    mtime_ns: its lease's end. atime_ns: its last use.
    """

    place: str
    name: str
    mtime_ns: int
    size: int
    atime_ns: int


class PoolDirectory:
    """A pool's directory. Creating one makes what is missing of it.

    Nothing that is listed or deleted here lies behind a symbolic link. Raises ConfigError for a
    path that cannot be a pool, StoreDenied for one that belongs to somebody else.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._places = [f"{root}/{n:02x}" for n in range(FAN_OUT)]
        self._tmp = root / "tmp"
        self._scratch: Scratch | None = None
        self._repair_lock = threading.Lock()
        self._closed = False
        self._check_root()
        self.repair()

    def path(self, key: BlockKey) -> str:
        """Returns where a key's value is, or would be."""
        return f"{self._places[zlib.crc32(key.encode()) % FAN_OUT]}/{key}"

    def temporary(self) -> str:
        """Returns a new path for an unfinished value; paths that begin with it and "-" are too."""
        assert self._scratch is not None
        return self._scratch.name()

    def delete(self, key: BlockKey) -> None:
        """Deletes a value; a missing one is fine."""
        _delete(self.path(key))

    def delete_all(self, prefix: str) -> None:
        """Deletes the values whose keys begin with `prefix`."""
        for place in self._places:
            with open_folder(place) as folder:
                names = os.listdir(folder) if folder is not None else []
                for name in names:
                    if name.startswith(prefix):
                        _delete(name, folder)

    def files(self) -> Iterator[StoredFile]:
        """Returns all values, in no order; those that vanish meanwhile may be missing."""
        for place in self._places:
            with open_folder(place) as folder:
                if folder is not None:
                    yield from _files_in(folder, place)

    def delete_unchanged(self, file: StoredFile) -> bool:
        """Deletes a value unless it was leased since it was looked at; False if it was."""
        with open_folder(file.place) as folder, contextlib.suppress(FileNotFoundError):
            if folder is not None:
                status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
                if status.st_mtime_ns != file.mtime_ns:
                    return False
                os.unlink(file.name, dir_fd=folder)
        return True

    def repair(self) -> None:
        """Makes the directories that are missing: at the start, or since somebody deleted them."""
        with self._repair_lock:
            if self._closed:
                return
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.root / _POOL_LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._tmp, 0o700)
            if not stat.S_ISDIR(os.lstat(self._tmp).st_mode):
                raise ConfigError(f"{self._tmp} is a link or a file: make it a directory")
            if self._scratch is None or not self._scratch.exists():
                old = self._scratch
                self._scratch = Scratch(self._tmp)
                if old is not None:
                    old.close()

    def lock(self) -> int | None:
        """Returns the evictor's lock, which ends when it is closed; None if it is taken."""
        try:
            return try_lock(f"{self.root}/{_POOL_LOCK}")
        except FileNotFoundError:
            self.repair()
            return try_lock(f"{self.root}/{_POOL_LOCK}")

    def sweep(self) -> None:
        """Deletes the unfinished values of dead writers, and directories that stay empty.

        A put that looked into such a directory just before makes it again; a new one is left alone,
        so that this happens to no put twice.
        """
        sweep(self._tmp)
        for place in self._places:
            with contextlib.suppress(OSError):  # missing, in use again; a link is not followed
                if os.lstat(place).st_mtime < time.time() - _EMPTY_S:
                    os.rmdir(place)

    def close(self) -> None:
        """Deletes this process's directory of unfinished values; twice is fine."""
        with self._repair_lock:
            if self._scratch is not None and not self._closed:
                self._scratch.close()
            self._closed = True

    def _check_root(self) -> None:
        root = self.root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"file://{root} is not a directory: name another one") from error
        status = root.stat()
        if status.st_uid != os.geteuid():
            raise StoreDenied(
                f"file://{root} belongs to user {status.st_uid}, not to {os.geteuid()}:"
                " chown it, or name a directory of this user"
            )
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise StoreDenied(
                f"file://{root} can be written by other users: chmod 700 it, or name another one"
            )
        names = set(os.listdir(root)) - _NOT_OURS
        if names and _POOL_LOCK not in names:
            raise ConfigError(
                f"file://{root} holds other files ({min(names)}) and is no pool:"
                " name an empty or a new directory, because old values are deleted from it"
            )


def _delete(path: str, folder: int | None = None) -> None:
    """Deletes a file, or a directory in its place; one that holds anything stays."""
    with contextlib.suppress(FileNotFoundError):  # somebody was faster
        try:
            os.unlink(path, dir_fd=folder)
        except IsADirectoryError:
            with contextlib.suppress(OSError):
                os.rmdir(path, dir_fd=folder)


def _files_in(folder: int, place: str) -> Iterator[StoredFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    yield StoredFile(
                        place, entry.name, status.st_mtime_ns, status.st_size, status.st_atime_ns
                    )


class Scratch:
    """A directory below `parent` that is locked for as long as its process lives.

    The lock says that the writer lives, not its pid: containers that share a pool do not see each
    other's processes.
    """

    def __init__(self, parent: Path) -> None:
        self._numbers = itertools.count()
        while True:  # a sweep of another process may take the new directory for a dead one's
            self._path = f"{parent}/{os.getpid()}-{secrets.token_hex(8)}"
            os.mkdir(self._path, 0o700)
            with contextlib.suppress(FileNotFoundError):
                lock = try_lock(f"{self._path}/{_LOCK}")
                if lock is not None and self.exists():
                    self._lock = lock
                    return
                if lock is not None:
                    os.close(lock)

    def name(self) -> str:
        """Returns a new path for an unfinished value."""
        return f"{self._path}/{next(self._numbers)}"

    def exists(self) -> bool:
        """True unless somebody has deleted the directory."""
        return os.path.exists(f"{self._path}/{_LOCK}")

    def close(self) -> None:
        """Deletes the directory, unless a put is still at work there: then the next sweep does.

        Call it once.
        """
        with contextlib.suppress(OSError):
            if os.listdir(self._path) == [_LOCK]:
                os.unlink(f"{self._path}/{_LOCK}")
                os.rmdir(self._path)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Deletes the unfinished values of writers that are dead.

    Links are not followed, and what no `Scratch` can have made stays.
    """
    with open_folder(parent) as folder:
        if folder is not None:
            for name in filter(_SCRATCH_NAME.fullmatch, os.listdir(folder)):
                _sweep_one(name, folder)


@contextlib.contextmanager
def open_folder(path: str | Path, parent: int | None = None) -> Iterator[int | None]:
    """Opens a directory for `dir_fd`; None for a missing one, a link, or no directory at all."""
    try:
        folder = os.open(path, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def try_lock(path: str, folder: int | None = None) -> int | None:
    """Returns a file descriptor that holds a file's lock until it is closed; None if it is taken.

    Raises ConfigError on a file system without flock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
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


def _sweep_one(name: str, parent: int) -> None:
    with open_folder(name, parent) as folder:
        lock = None if folder is None else _lock_of(folder)
        if folder is None or lock is None:
            return
        try:
            if not os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder)):
                return  # another sweep deleted this lock, and the directory has a new one
            for file in os.listdir(folder):
                with contextlib.suppress(IsADirectoryError):  # not of our making: it stays
                    os.unlink(file, dir_fd=folder)
            os.rmdir(name, dir_fd=parent)
        except OSError as error:  # it is gone; or it is new, and its maker has moved in again
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        finally:
            os.close(lock)


def _lock_of(folder: int) -> int | None:
    try:
        return try_lock(_LOCK, folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            raise
        return None
