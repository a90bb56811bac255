"""TimedReader: bytes of a socket until a deadline, however often some come."""

from __future__ import annotations

import io
import socket

from pdstore.threads import Deadline


class TimedReader(io.RawIOBase):
    """Reads from a connected socket for `seconds` in all, then raises TimeoutError.

    Keeps the socket open until it is closed, as a file that `makefile` returns does.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._deadline = connection, Deadline(seconds)
        self._file = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        left_s = self._deadline.remaining_s()
        if left_s == 0.0:
            raise TimeoutError("the bytes took too long to come")
        self._connection.settimeout(left_s)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
