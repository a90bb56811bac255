"""Damage: bits flipped in the files of a pool."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_UNIT = 4096  # an arena's places begin at multiples of it
_ARENA = struct.Struct("<8sIIq")  # how an arena's file begins: magic, version, a count, data bytes


def damage(directory: Path) -> int:
    """Flips a bit in each 4 KiB that a pool's values take; returns how many.

    Holes stay holes, and an arena's index stays right, so that its pages are found.
    """
    return sum(map(_flip, _files(directory)))


def _flip(file: Path) -> int:
    num_bits = 0
    for first, stop in _data(file, _first_value(file)):
        middles = np.memmap(file, np.uint8, "r+", first, stop - first)[_UNIT // 2 :: _UNIT]
        middles ^= 1
        num_bits += len(middles)
    return num_bits


def _files(directory: Path) -> list[Path]:
    """Returns the files that hold values: a page has more than 4 KiB."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return [file for file in files if file.stat().st_size > _UNIT]


def _first_value(file: Path) -> int:
    """Returns where values begin: in an arena's file behind its index, else at once."""
    with file.open("rb") as opened:
        beginning = opened.read(_ARENA.size)
    if not beginning.startswith(b"PDSarena"):
        return 0
    *_, data_bytes = _ARENA.unpack(beginning)
    return file.stat().st_size - int(data_bytes)


def _data(file: Path, at: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a file, from an offset on, that are no holes."""
    with file.open("rb") as opened:
        while at < file.stat().st_size:
            try:
                at = os.lseek(opened.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            stop = os.lseek(opened.fileno(), at, os.SEEK_HOLE)
            yield at, stop
            at = stop
