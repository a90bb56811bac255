"""Values as files, read and written by Python: without checksums."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from pdstore.store.base import Slots
from pdstore.store.file.errors import OTHER_LENGTH

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo that somebody put there cannot hang us


class Ended(NamedTuple):
    """The result of reading or writing some files in turn.

    num_done: number of files that were read or written.
    why: 0 after the last; else the errno of the next one, or OTHER_LENGTH.
    """

    num_done: int
    why: int


def read_values(paths: Sequence[str], slots: Slots) -> Ended:
    """Reads whole files into their slots, in turn, until one cannot be read."""
    spare = bytearray(1)
    for n, path in enumerate(paths):
        try:
            length = _read(path, slots.value(n), spare)
        except OSError as error:
            return Ended(n, error.errno or 0)
        if length != slots.sizes[n]:
            return Ended(n, OTHER_LENGTH)
    return Ended(len(paths), 0)


def write_values(temporary: str, paths: Sequence[str], slots: Slots) -> Ended:
    """Writes each slot to its path unless a file is there, in turn, until one cannot be written.

    The directory of a path is made at its first use, because all 256 of a pool take 40 ms; the one
    above it is not.

    temporary: a name on the same file system, for the file that is not whole yet.
    """
    was_stored = False
    for n, path in enumerate(paths):
        was_stored = was_stored and os.access(path, os.F_OK)
        try:
            was_stored = was_stored or not _write(temporary, path, slots.value(n))
        except OSError as error:
            return Ended(n, error.errno or 0)
    return Ended(len(paths), 0)


def _read(path: str, piece: memoryview, spare: bytearray) -> int:
    """Reads a file into `piece`. Returns its length, or a larger number than `piece` has bytes.

    `spare` is one byte more, which only a longer file reaches: it saves a look at the length.
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


def _write(temporary: str, path: str, piece: memoryview) -> bool:
    """Writes a file whole. Returns False if there is one already."""
    fd = os.open(temporary, _CREATE, 0o600)
    try:
        try:
            done = os.write(fd, piece)
            while done < len(piece):
                done += os.write(fd, piece[done:])
        finally:
            os.close(fd)
        _link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _link(temporary: str, path: str) -> None:
    """Gives a file its name; not by a rename, which would replace what is stored."""
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        os.link(temporary, path)
