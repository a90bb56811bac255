"""PoolDirectory: where a file store's values lie on disk, and where unfinished ones are written.

<root>/pool.lock          marks a pool; whoever holds its flock evicts
<root>/<00..ff>/<key>     a value: its whole content, its lease's end as modification time
<root>/tmp/<pid>-<random> a process's unfinished values; its `lock` is held while it lives
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError, StoreDenied
from pdstore.format.keys import BlockKey

FAN_OUT = 256
_LOCK = "pool.lock"
_NOT_OURS = frozenset({"lost+found"})  # an empty file system has it


class StoredFile(NamedTuple):
    """A value on disk."""

    path: str
    name: str
    mtime_ns: int
    size: int


class PoolDirectory:
    """A pool's directory. Creating one makes what is missing of it.

    Raises ConfigError for a path that cannot be a pool, StoreDenied for one of somebody else's.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._places = [f"{root}/{n:02x}/" for n in range(FAN_OUT)]
        self._tmp = root / "tmp"
        self._made: set[str] = set()
        self._scratch: Scratch | None = None
        self._repair_lock = threading.Lock()
        self._check_root()
        self.repair()

    def path(self, key: BlockKey) -> str:
        """Where a key's value is."""
        return self._places[zlib.crc32(key.encode()) % FAN_OUT] + key

    def make_place(self, path: str) -> None:
        """Makes the directory that a value goes to; once, because 256 at the start take 40 ms."""
        place, _, _ = path.rpartition("/")
        if place not in self._made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
            self._made.add(place)

    def temporary(self) -> str:
        """A new name for an unfinished value."""
        assert self._scratch is not None
        return self._scratch.name()

    def paths(self, prefix: str) -> Iterator[str]:
        """Where the values are whose keys begin so; asks for no more than their names."""
        for place in self._places:
            with contextlib.suppress(FileNotFoundError):
                yield from (place + name for name in os.listdir(place) if name.startswith(prefix))

    def files(self) -> Iterator[StoredFile]:
        """All values, in no order; those that vanish meanwhile may be missing."""
        for place in self._places:
            with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            yield StoredFile(
                                entry.path, entry.name, status.st_mtime_ns, status.st_size
                            )

    def repair(self) -> None:
        """Makes the directories that are missing: at the start, or since somebody deleted them."""
        with self._repair_lock:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._tmp, 0o700)
            self._made.clear()
            if self._scratch is None or not self._scratch.exists():
                self.close()
                self._scratch = Scratch(self._tmp)

    def lock(self) -> int | None:
        """The evictor's lock, to be ended by closing it; None while another one holds it."""
        try:
            return try_lock(f"{self.root}/{_LOCK}")
        except FileNotFoundError:
            self.repair()
            return try_lock(f"{self.root}/{_LOCK}")

    def sweep(self) -> None:
        """Deletes the unfinished values of writers that are dead."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._tmp):
                _sweep(f"{self._tmp}/{name}")

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

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
        if names and _LOCK not in names:
            raise ConfigError(
                f"file://{root} holds other files ({min(names)}) and is no pool:"
                " name an empty or a new directory, because old values are deleted from it"
            )


class Scratch:
    """One process's directory for unfinished values, locked for as long as the process lives.

    The lock says that the writer lives, not its pid: containers that share a pool do not see each
    other's processes.
    """

    def __init__(self, parent: Path) -> None:
        self._numbers = itertools.count()
        while True:  # a sweep of another process may take the new directory for a dead one's
            self._path = f"{parent}/{os.getpid()}-{secrets.token_hex(8)}"
            os.mkdir(self._path, 0o700)
            with contextlib.suppress(FileNotFoundError):
                lock = try_lock(f"{self._path}/lock")
                if lock is not None and self.exists():
                    self._lock = lock
                    return
                if lock is not None:
                    os.close(lock)

    def name(self) -> str:
        return f"{self._path}/{next(self._numbers)}"

    def exists(self) -> bool:
        return os.path.exists(f"{self._path}/lock")

    def close(self) -> None:
        """Deletes the directory, unless a put is still at work there: then the next sweep does."""
        with contextlib.suppress(OSError):
            if os.listdir(self._path) == ["lock"]:
                os.unlink(f"{self._path}/lock")
                os.rmdir(self._path)
        os.close(self._lock)


def try_lock(path: str) -> int | None:
    """A file descriptor that holds the lock of a file until it is closed; None if it is taken.

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


def _sweep(scratch: str) -> None:
    try:
        lock = try_lock(f"{scratch}/lock")
    except (FileNotFoundError, NotADirectoryError):
        return
    if lock is None:
        return
    try:
        if not os.path.samestat(os.fstat(lock), os.stat(f"{scratch}/lock")):
            return  # another sweep deleted this lock, and the directory has a new one
        for name in os.listdir(scratch):
            os.unlink(f"{scratch}/{name}")
        os.rmdir(scratch)
    except OSError as error:  # it is gone; or it was a new one, and its maker has moved in again
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
    finally:
        os.close(lock)
