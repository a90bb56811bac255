"""Bell: wakes the processes of this host when something is put into a pool's directory.

<root>/bells/<boot id>-<pid>-<random>   a named pipe of each process that listens

A put writes a byte into the pipe of every listener, which polls its own pipe. It also removes a
pipe that no process reads. A pipe of another boot may be another host's: it is removed only if its
modification time is old. So a listener renews that time every minute, and makes a new pipe if
somebody removed its own.
"""

# Decision: docs/decisions/027-file-bells.md
from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pdstore.threads import Deadline

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OPEN = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES = 64 << 10


class Bell:
    """One process's pipe. Any thread may wake and wait; `close` interrupts no wait.

    now_ns: the time of the file system, which may be another host's.
    touch_interval_s: a waiting process renews its pipe's modification time after so many seconds.
    max_age_s: a pipe of another boot is removed if its modification time is older than this.
    """

    def __init__(
        self,
        root: Path,
        now_ns: Callable[[], int] = time.time_ns,
        touch_interval_s: float = 60.0,
        max_age_s: float = 86_400.0,
    ) -> None:
        self._folder = root / "bells"
        self._now_ns = now_ns
        self._touch_interval_s = touch_interval_s
        self._max_age_s = max_age_s
        self._touch_deadline = Deadline(0.0)
        self._boot = _boot_id()
        self._number = 0  # counts the wakes that were read
        self._pipe: int | None = None
        self._path: Path | None = None
        self._polling = threading.Lock()
        self._is_closed = False

    def wake_all(self) -> None:
        """Wakes all listeners; does nothing if the directory is gone or cannot be read."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                self._wake(name)

    def wait_for_wake(self, seen: int | None, timeout_s: float) -> int:
        """Waits as `TellsChanges.wait_for_change` does. Raises OSError if it cannot make a pipe."""
        if seen is None or self._touch_deadline.is_over():
            self._listen()
        if seen is None:
            return self._number
        deadline = Deadline(timeout_s)
        while self._number == seen and not deadline.is_over():
            if self._polling.acquire(timeout=deadline.remaining_s()):
                try:
                    if self._number == seen:
                        self._poll(deadline.remaining_s())
                finally:
                    self._polling.release()
        return self._number

    def close(self) -> None:
        """Stops listening, and removes the pipe."""
        self._is_closed = True
        with self._polling:
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()
                self._path = None
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None

    def _listen(self) -> None:
        """Renews the modification time of this process's pipe; makes a new pipe if it has none."""
        with self._polling:
            self._touch_deadline = Deadline(self._touch_interval_s)
            if self._is_closed:
                return
            if self._path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._path)
                    return
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None
                self._number += 1  # a wake may have been lost with the old pipe
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._folder / f"{self._boot}-{os.getpid()}-{secrets.token_hex(4)}"
            unseen = path.with_name(f".{path.name}")
            os.mkfifo(unseen, 0o600)
            try:
                # RDWR: a pipe without any writer would be at its end of file
                self._pipe = os.open(unseen, os.O_RDWR | _OPEN)
                unseen.rename(path)  # now that it has a reader
            except OSError:
                unseen.unlink()
                raise
            self._path = path

    def _poll(self, timeout_s: float) -> None:
        if self._pipe is None:
            return
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if poll.poll(timeout_s * 1e3):
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, _READ_BYTES)
            self._number += 1

    def _wake(self, name: str) -> None:
        path = self._folder / name
        try:
            pipe = os.open(path, os.O_WRONLY | _OPEN)
        except OSError as error:
            if error.errno == errno.ENXIO:
                self._remove_abandoned(path)
            return
        try:
            if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                # the pipe is full, so its reader wakes anyway, or its reader has just closed it
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(pipe, b"!")
        finally:
            os.close(pipe)

    def _remove_abandoned(self, path: Path) -> None:
        """Removes a pipe without a reader on this host, unless another host may still read it."""
        with contextlib.suppress(OSError):  # another put may have removed it
            is_old = self._now_ns() - path.lstat().st_mtime_ns > self._max_age_s * 1e9
            # a pipe gets its name after its reader: one of this boot has lost its reader
            if is_old or path.name.startswith(f"{self._boot}-"):
                path.unlink()


def _boot_id() -> str:
    """Returns the id of this host's boot; other hosts and later boots have another id."""
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        return "unknown"
