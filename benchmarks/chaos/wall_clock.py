"""WallClock: the wall clock of one instance, which another process can set forward and back."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_SHIFT = struct.Struct("<q")
MAX_CLOCKS = 16


class WallClock:
    """One of several clocks in a file that the driver and the instances map.

    Only Python's `time.time` and `time.time_ns` are moved. The monotonic clock never jumps, on any
    machine; and libpdstore asks the kernel for the time itself, so the arena is not reached.
    """

    def __init__(self, mapped: mmap.mmap, number: int) -> None:
        self._mapped, self._at = mapped, number * _SHIFT.size

    @classmethod
    def create(cls, path: Path, number: int) -> WallClock:
        """Makes the file if there is none."""
        if not path.exists():
            path.write_bytes(bytes(MAX_CLOCKS * _SHIFT.size))
        return cls.join(path, number)

    @classmethod
    def join(cls, path: Path | str, number: int) -> WallClock:
        with Path(path).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0), number)

    def shift(self, seconds: float) -> None:
        """Sets the clock to so many seconds from the real time."""
        _SHIFT.pack_into(self._mapped, self._at, int(seconds * 1e9))

    def install(self) -> None:
        """Makes this clock the one of the calling process."""
        real_ns = time.time_ns

        def shifted_ns() -> int:
            return int(real_ns() + _SHIFT.unpack_from(self._mapped, self._at)[0])

        time.time_ns = shifted_ns
        time.time = lambda: shifted_ns() / 1e9
