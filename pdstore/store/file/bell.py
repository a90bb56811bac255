"""Bell: wakes the processes of this host when something is put into a pool's directory.

<root>/bells   a folder that every put opens; the kernel tells the listeners, by inotify
"""

# Decision: docs/decisions/027-file-bells.md
from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from inotify_simple import INotify, flags

from pdstore.threads import Deadline

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENED = flags.OPEN | flags.ONLYDIR | flags.DONT_FOLLOW


class Bell:
    """One process's watch. Any thread may wake and wait; `close` interrupts no wait."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "bells"
        self._number = 0  # counts the wakes that were read
        self._inotify: INotify | None = None
        self._watch: int | None = None  # None also if somebody removed the folder
        self._polling = threading.Lock()
        self._is_closed = False

    def wake_all(self) -> None:
        """Wakes all listeners; does nothing if nobody has listened in this directory yet."""
        with contextlib.suppress(OSError):
            os.close(os.open(self._folder, _FOLDER))

    def wait_for_wake(self, seen: int | None, timeout_s: float) -> int:
        """Waits as `TellsChanges.wait_for_change` does. Raises OSError if it cannot watch."""
        if seen is None or self._watch is None:
            self._listen()
        if seen is None:
            return self._number
        deadline = Deadline(timeout_s)
        while self._number == seen and not deadline.is_over():
            if self._polling.acquire(timeout=deadline.remaining_s()):
                try:
                    if self._number == seen:
                        self._read(deadline.remaining_s())
                finally:
                    self._polling.release()
        return self._number

    def close(self) -> None:
        """Stops listening."""
        self._is_closed = True
        with self._polling:
            if self._inotify is not None:
                self._inotify.close()
                self._inotify = None

    def _listen(self) -> None:
        """Watches the folder that is now in its place; makes it if there is none."""
        with self._polling:
            if self._is_closed:
                return
            if self._inotify is None:
                self._inotify = INotify()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            watch = _watched(self._inotify, self._folder)
            if watch != self._watch:
                self._watch = watch
                self._number += 1  # nobody watched this folder, so a wake may have been lost

    def _read(self, timeout_s: float) -> None:
        if self._inotify is None:
            return
        events = list(self._inotify.read(timeout=int(timeout_s * 1e3)))
        if events:
            self._number += 1
        if any(event.mask & flags.IGNORED for event in events):
            self._watch = None


def _watched(inotify: INotify, folder: Path) -> int:
    """Watches a folder; returns the watch's number. Raises OSError, EMFILE for too many watches.

    The kernel calls them ENOSPC, which here would mean a full disk.
    """
    try:
        return int(inotify.add_watch(folder, _OPENED))
    except OSError as error:
        why = errno.EMFILE if error.errno == errno.ENOSPC else error.errno
        raise OSError(why, error.strerror) from error
