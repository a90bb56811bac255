"""Direct: moves the values of a pool of files past the page cache, for `?direct=1`.

io_uring does it, in the native library. Where that is refused, as in many containers, threads of
the library do it; without a library, Python does it, one file after the other.
"""

# Decision: docs/decisions/049-direct-files.md
from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pdstore.errors import ConfigError
from pdstore.native.library import FileWay
from pdstore.store.base import Slots
from pdstore.store.file.files import OTHER_LENGTH, READ, Built, Ended, packed, write_each
from pdstore.store.file.mount import FULL, Doubt, Mount

_PAGE = 4096  # the grain of all addresses, places and lengths of a direct read or write
_PIECE = 1 << 20
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_WITHOUT = "leave direct=1 out, or name a directory on a disk (ext4, xfs)"


class DirectFiles:
    """Reads and writes whole files past the page cache. Any thread may call it.

    built: as `FileStore` takes it. by_threads: True for threads where io_uring is allowed, too.

    way: as which the library's calls get it.
    """

    def __init__(self, built: Built, *, by_threads: bool = False) -> None:
        self._built = built
        self.way = FileWay.DIRECT_BY_THREADS if by_threads else FileWay.DIRECT

    def check(self, root: Path, mount: Mount, temporary: str) -> None:
        """Raises ConfigError if the file system has no direct reads and writes; and OSError.

        temporary: a path on it, at which nothing is.
        """
        if mount.kind in _IN_MEMORY:
            raise ConfigError(
                f"file://{root}: direct=1 is for disks, and this {mount.kind} is memory: {_WITHOUT}"
            )
        try:
            _try_page(temporary)
        except OSError as error:
            if error.errno in FULL:
                return
            if error.errno not in _REFUSED:
                raise
            raise ConfigError(
                f"file://{root}: its file system has no direct reads and writes"
                f" ({error.strerror}): {_WITHOUT}"
            ) from error

    def doubts(self) -> Iterator[Doubt]:
        """Yields a doubt if io_uring is refused here."""
        library = self._built()
        if library is not None and self.way is FileWay.DIRECT and (why := library.why_no_ring()):
            message = f"io_uring is refused here ({os.strerror(why)}), so threads read and write"
            remedy = "allow io_uring_setup and io_uring_enter in the container's seccomp profile"
            yield Doubt("direct", message, remedy)

    def read_values(self, paths: Sequence[str], slots: Slots) -> Ended:
        """Reads whole files into their slots, up to the first that cannot be read."""
        library = self._built()
        if library is not None:
            return Ended(*library.read_files(self.way, paths, *packed(slots)))
        with _pages() as pages:
            for n, path in enumerate(paths):
                try:
                    is_right = _read(path, slots.value(n), pages)
                except OSError as error:
                    return Ended(n, error.errno or 0)
                if not is_right:
                    return Ended(n, OTHER_LENGTH)
        return Ended(len(paths), 0)

    def write_values(self, temporary: str, paths: Sequence[str], slots: Slots) -> Ended:
        """Writes slots to their paths as `files.write_values` does."""
        library = self._built()
        if library is not None:
            return Ended(*library.write_files(self.way, temporary, paths, *packed(slots)))
        with _pages() as pages:
            return write_each(temporary, paths, slots, partial(_write, pages), os.O_DIRECT)


@contextlib.contextmanager
def _pages() -> Iterator[memoryview]:
    """Lends memory for one piece of a file, aligned as direct reads and writes need it."""
    with mmap.mmap(-1, _PIECE) as memory, memoryview(memory) as view:
        yield view


def _read(path: str, piece: memoryview, pages: memoryview) -> bool:
    """Reads a file by way of `pages`; returns whether it has exactly the length of `piece`."""
    fd = os.open(path, READ)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(piece):
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        at = 0
        while at < len(piece):
            with pages[: _in_pages(len(piece) - at)] as room:
                more = min(os.preadv(fd, [room], at), len(piece) - at)
            if more < _PAGE and at + more < len(piece):
                return False  # it has become shorter
            if at + more < len(piece):
                more -= more % _PAGE
            piece[at : at + more] = pages[:more]
            at += more
        return True
    finally:
        os.close(fd)


def _write(pages: memoryview, piece: memoryview, fd: int) -> None:
    """Writes to an open file by way of `pages`, the last page in full; then cuts the file."""
    at = 0
    while at < len(piece):
        own = min(len(piece) - at, len(pages))
        pages[:own] = piece[at : at + own]
        with pages[: _in_pages(own)] as room:
            more = os.pwritev(fd, [room], at)
        if more < own:
            more -= more % _PAGE
        if more == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        at += more
    os.ftruncate(fd, len(piece))


def _in_pages(num_bytes: int) -> int:
    return min(-(-num_bytes // _PAGE) * _PAGE, _PIECE)


def _try_page(path: str) -> None:
    """Writes a page past the page cache, and reads it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
    try:
        fd = os.open(path, flags, 0o600)
        try:
            with _pages() as pages, pages[:_PAGE] as page:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
