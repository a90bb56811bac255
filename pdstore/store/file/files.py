"""Values as files: functions that read, write and lease files in turn; errnos as StoreErrors.

This Python code handles no checksums. libpdstore does (`FileStore.get_right`, `put_sealed`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pdstore.errors import (
    PDStoreError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.native.library import FileWay, Library, address_of
from pdstore.store.base import Slots
from pdstore.store.file.mount import FULL

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags with which values are opened; a fifo that somebody put there cannot hang the open."""
OTHER_LENGTH = -1
"""Stands for an errno where a file does not have the expected length."""
_KINDS: dict[int, type[StoreError]] = {
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    **dict.fromkeys((*FULL, errno.EFBIG), StoreFull),
    errno.ETIMEDOUT: StoreTimeout,
    **dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENXIO), WrongLength),  # no regular file
    OTHER_LENGTH: WrongLength,
}
_REMEDIES = {
    errno.EACCES: "look at the owner and the mode of its directory",
    errno.EPERM: "look at the owner and the mode of its directory",
    errno.EROFS: "mount it so that this instance may write: P puts values, and D leases them",
    errno.ENOSPC: "free some of its disk",
    errno.EDQUOT: "free some of this user's quota",
    errno.EMFILE: "raise ulimit -n to 65536",
}
_OF_THIS_PLACE = (errno.EROFS, *FULL, errno.EMFILE)
"""Errnos for which another directory is no remedy."""
UNREADABLE = frozenset(
    getattr(errno, name)
    for name in ("EIO", "EACCES", "EPERM", "ESTALE", "EUCLEAN", "EBADMSG", "EREMOTEIO", "ENODATA")
)
"""Errnos that may be about one file alone: a bad sector, another owner, a stale handle."""


Built = Callable[[], Library | None]
"""A function that returns the native library if it is built."""


def error_of(label: str, why: int, what: str, num_done: int = 0) -> StoreError:
    """Returns the error for an errno, or for OTHER_LENGTH."""
    kind = _KINDS.get(why, StoreUnavailable)
    text = "not the length that was asked for" if why == OTHER_LENGTH else os.strerror(why)
    remedy = _REMEDIES.get(why, "look at its file system" if kind is StoreUnavailable else "")
    with contextlib.suppress(OSError):
        status = os.statvfs(label.partition("://")[2])
        if why == errno.ENOSPC and status.f_files and status.f_favail < 4:  # a put needs up to 2
            text = "no inodes are left"
            remedy = "delete files, or make the file system with more"
    if why == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        remedy = f"a file may have {most} bytes: raise ulimit -f (LimitFSIZE= of systemd)"
    message = f"{label}: {text}: {what}"
    return kind(message, num_done=num_done, remedy=remedy)


@contextlib.contextmanager
def named_error(
    label: str, what: str, num_done: int = 0, *, other_place: str = ""
) -> Iterator[None]:
    """Turns an OSError of the statements inside into the StoreError for its errno.

    what: what failed.
    other_place: the message has it in place of `what` if another directory would be a remedy.
    """
    try:
        yield
    except PDStoreError:  # some PDStoreErrors are OSErrors as well
        raise
    except OSError as error:
        why = error.errno or 0
        message = what if not other_place or why in _OF_THIS_PLACE else other_place
        raise error_of(label, why, message, num_done) from error


class Ended(NamedTuple):
    """The result of reading or writing some files in turn.

    num_done: number of files that were read or written.
    why: 0 if those are all files; else the errno of the first other file, or OTHER_LENGTH.
    """

    num_done: int
    why: int


def read_values(built: Built, paths: Sequence[str], slots: Slots) -> Ended:
    """Reads whole files into their slots, in turn, until one cannot be read.

    built: as `FileStore` takes it. A library reads all of them in one call, so that the caller
      waits only once for the GIL.
    """
    if (library := built()) is not None:
        return Ended(*library.read_files(FileWay.CACHED, paths, *packed(slots)))
    spare = bytearray(1)
    for n, path in enumerate(paths):
        try:
            length = _read(path, slots.value(n), spare)
        except OSError as error:
            return Ended(n, error.errno or 0)
        if length != slots.sizes[n]:
            return Ended(n, OTHER_LENGTH)
    return Ended(len(paths), 0)


def write_values(built: Built, temporary: str, paths: Sequence[str], slots: Slots) -> Ended:
    """Writes slots to their paths in turn, except where a file exists; stops at the first error.

    The directory of a path is made at its first use, because making all 256 directories of a pool
    takes 40 ms. Its parent directory is not made.

    built: as `read_values` takes it.
    temporary: a name on the same file system, for a file that is not whole yet.
    """
    if (library := built()) is not None:
        return Ended(*library.write_files(FileWay.CACHED, temporary, paths, *packed(slots)))
    return write_each(temporary, paths, slots, _write_all)


def write_each(
    temporary: str,
    paths: Sequence[str],
    slots: Slots,
    write: Callable[[memoryview, int], None],
    flags: int = 0,
) -> Ended:
    """Writes slots to their paths as `write_values` does, each by `write` to an open file.

    flags: more flags with which the files are opened.
    """
    n = 0
    try:
        for n, path in enumerate(paths):
            if not os.access(path, os.F_OK):
                _make_file(temporary, path, partial(write, slots.value(n)), flags)
    except OSError as error:
        return Ended(n, error.errno or 0)
    return Ended(len(paths), 0)


def renew_leases(paths: Sequence[str], now: int, end: int, library: Library | None) -> Ended:
    """Renews the leases of files in turn, until one is missing or fails.

    The lease of each file ends 1 ns earlier than that of the file before, so that the last blocks
    of a prompt are evicted first. The native library renews all leases in one call, so that the
    caller waits only once for the GIL.

    now, end: the time of the file system and the first lease's end, in nanoseconds.
    """
    if library is not None:
        return Ended(*library.lease_files(paths, now, end))
    num_done = 0
    try:
        for path in paths:
            os.utime(path, ns=(now, end - num_done), follow_symlinks=False)
            num_done += 1
    except OSError as error:
        return Ended(num_done, error.errno or 0)
    return Ended(num_done, 0)


def packed(slots: Slots) -> tuple[bytes, bytes]:
    """Returns where the slots lie and their values' sizes, as the library takes them."""
    base = address_of(slots.view)
    addresses = [base + number * slots.slot_bytes for number in slots.numbers]
    return array("Q", addresses).tobytes(), array("q", slots.sizes).tobytes()


def can_read(path: str) -> bool:
    """Returns whether the first byte of a file can be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, READ)
        try:
            return len(os.read(fd, 1)) == 1
        finally:
            os.close(fd)
    return False


def _read(path: str, piece: memoryview, spare: bytearray) -> int:
    """Reads a file into `piece`. Returns its length, or a larger number than `piece` has bytes.

    `spare` is one more byte, which only a file that is too long fills. This saves the system call
    that would ask for the file's length.
    """
    fd = os.open(path, READ)
    try:
        done = more = os.readv(fd, [piece, spare])
        while more and done < len(piece):
            more = os.readv(fd, [piece[done:], spare])
            done += more
        return done
    finally:
        os.close(fd)


def _write_all(piece: memoryview, fd: int) -> None:
    done = os.write(fd, piece)
    while done < len(piece):
        done += os.write(fd, piece[done:])


def _make_file(temporary: str, path: str, write: Callable[[int], None], flags: int) -> None:
    """Makes a file, whole or not at all; leaves the file alone if others have made it."""
    fd = os.open(temporary, _CREATE | flags, 0o600)
    try:
        try:
            write(fd)
            os.utime(fd)  # a value that is used when it is whole, not when its writing began
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            _link(temporary, path)
    finally:
        os.unlink(temporary)


def _link(temporary: str, path: str) -> None:
    """Gives a file its name by a link, because a rename would replace a value that is stored."""
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        os.link(temporary, path)
