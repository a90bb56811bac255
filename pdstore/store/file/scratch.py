"""Scratch: one process's directory for unfinished values, and the sweep of those of dead ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from pdstore.errors import ConfigError

_LOCK = "lock"
_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


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
            for name in filter(_NAME.fullmatch, os.listdir(folder)):
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
