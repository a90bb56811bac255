"""open_arena_file: opens an arena's file, or makes one that only this user may read and write."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from pydantic import ByteSize

from pdstore.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from pdstore.native.arena import format_arena
from pdstore.native.library import Library
from pdstore.store.file.mount import mount_of

DEFAULT_SIZE = 20 << 30
SLAB_BYTES = 64 << 20
"""Bytes of a slab. Registering 64 MiB with a GPU takes 1 ms, and 3 ms in parts of 16 MiB."""
_MIN_SLAB_BYTES = 64 << 10
_MIN_SLABS = 16
_WRITABLE = "name a directory that this user may write to (?dir=)"
_LACKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a fifo in its place does not hang


def open_arena_file(path: Path, library: Library, size: int | None, slab_bytes: int | None) -> int:
    """Opens the arena at a path, or makes it; returns a file descriptor.

    size, slab_bytes: as `ArenaStore` takes them.
    Raises ConfigError for a size that does not fit, StoreDenied for a file of another user,
    StoreUnavailable if the file system refuses.
    """
    try:
        for _ in range(3):  # somebody else may make or remove the file at the same time
            with contextlib.suppress(FileNotFoundError):
                return _checked(os.open(path, _OPEN), path)
            with contextlib.suppress(FileExistsError):
                return _make(path, library, size, slab_bytes)
    except StoreError:  # some StoreErrors are OSErrors as well
        raise
    except PermissionError as error:
        raise StoreDenied(f"{path}: {error.strerror}; {_WRITABLE}") from error
    except OSError as error:
        what = f"; {_WRITABLE}" if error.errno == errno.EROFS else ""
        raise StoreUnavailable(f"{path}: {error.strerror or error}{what}") from error
    raise StoreUnavailable(f"{path} appears and vanishes: somebody else removes it")


def why_too_long(path: Path, num_bytes: int, slab_bytes: int) -> str | None:
    """Returns why the arena at a path cannot hold a value of `num_bytes`; None if it can."""
    if num_bytes <= slab_bytes:
        return None
    wanted = 1 << (num_bytes - 1).bit_length()
    return (
        f"{path} has slabs of {slab_bytes} bytes, and a value of {num_bytes} bytes needs a larger"
        " one: remove the file when nobody uses it, and write"
        f" ?slab={_readable(wanted)} with ?size={_readable(wanted * _MIN_SLABS)} or more"
    )


def why_not_found(path: Path, opened: os.stat_result) -> str | None:
    """Returns why new instances do not find an arena that was opened at a path; None if they do.

    opened: what `os.fstat` told of the arena's file when it was opened.
    """
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError as error:
        what = "was removed" if error.errno == errno.ENOENT else f"is not found ({error.strerror})"
    else:
        if os.path.samestat(there, opened):
            return None
        what = "was removed, and another file has its place"
    return (
        f"{path} {what} while this instance ran: instances that start now use another pool, so"
        " restart this one. At a user's last logout systemd-logind removes that user's files in"
        " /dev/shm: run as a system user, or set RemoveIPC=no in logind.conf"
    )


def _checked(fd: int, path: Path) -> int:
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreDenied(f"{path} is not a regular file: remove it, or name another arena")
        if status.st_uid != os.geteuid():
            raise StoreDenied(
                f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: name another arena"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StoreDenied(f"{path} can be opened by other users: chmod 600 it, or remove it")
    except StoreDenied:
        os.close(fd)
        raise
    return fd


def _make(path: Path, library: Library, size: int | None, slab_bytes: int | None) -> int:
    """Makes an arena's file without a name, and gives the file its name when it is whole."""
    wanted = _size_of(path.parent, size, slab_bytes)
    slab = slab_bytes or _default_slab(wanted)
    num_bytes = wanted // slab * slab
    fd = _open_unnamed(path.parent)
    try:
        os.fchmod(fd, 0o600)  # the umask may have removed some of these bits
        format_arena(library, fd, num_bytes, slab, secrets.randbits(64))
        # os.link follows /proc's link only with a dst_dir_fd, which an absolute path does not use
        link = f"/proc/self/fd/{fd}"
        os.link(link, path.absolute(), dst_dir_fd=fd, follow_symlinks=True)
    except ValueError as error:
        os.close(fd)
        raise ConfigError(
            f"{path}: no arena has {_readable(wanted)} in slabs of {_readable(slab)}: write"
            " a ?size= of less than 16 TiB that has 1 to 131,072 slabs, and a multiple of 4 KiB up"
            " to 4 GiB as ?slab=, or leave ?slab= out"
        ) from error
    except OSError as error:
        os.close(fd)
        if error.errno in (None, *_LACKS):
            raise _unfit(path.parent, f"a file of {_readable(num_bytes)} by fallocate") from error
        raise
    return fd


def _size_of(directory: Path, size: int | None, slab_bytes: int | None) -> int:
    """Returns how many bytes a new arena is to have.

    Raises ConfigError if an arena must be larger, or if the directory's file system is full or does
    not tell its free space.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    is_told = status.f_blocks > 0  # not by ramfs, nor by a hugetlbfs mounted without size=
    if size is None:
        if not is_told:
            raise ConfigError(
                f"{directory} does not tell its free space: write a ?size=, as for ramfs and for"
                " hugetlbfs that is mounted without size="
            )
        size = min(DEFAULT_SIZE, free // 2)
        if size < _MIN_SLAB_BYTES:
            raise ConfigError(
                f"{directory} is full, {_readable(free)} are free: delete files there, or name"
                " another directory (?dir=); in a container, raise --shm-size"
            )
    if slab_bytes is None and size < _MIN_SLAB_BYTES:
        raise ConfigError(
            f"?size={_readable(size)} is less than the smallest arena,"
            f" {_readable(_MIN_SLAB_BYTES)}: write a larger one with its unit, like ?size=64GiB"
        )
    if is_told and size > free:
        raise ConfigError(
            f"{directory} has {_readable(free)} free, and the arena is to have"
            f" {_readable(size)}: make it smaller (?size=), or name another directory (?dir=);"
            " in a container, raise --shm-size"
        )
    return size


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno in (errno.EISDIR, *_LACKS):
            raise _unfit(directory, "files without a name (O_TMPFILE)") from error
        raise


def _unfit(directory: Path, lack: str) -> ConfigError:
    kind = mount_of(directory).kind or "its file system"
    return ConfigError(
        f"{directory} is on {kind}, which does not make {lack}: name a directory in memory, on a"
        " tmpfs as /dev/shm (?dir=)"
    )


def _default_slab(num_bytes: int) -> int:
    """Returns the largest power of two, within limits, that gives the arena 16 slabs or more."""
    slab = SLAB_BYTES
    while slab > _MIN_SLAB_BYTES and slab * _MIN_SLABS > num_bytes:
        slab //= 2
    return slab


def _readable(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()
