"""Closes the library's objects in time, at exit and on SIGTERM, or sets them aside."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Collection
from types import FrameType
from typing import Protocol

from pdstore.async_runner import AsyncRunner
from pdstore.errors import StoreError
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

DRAIN_S = 0.5
CLOSE_S = 2.0
_DRAIN_AT_EXIT_S, _CLOSE_AT_EXIT_S = 1.0, 10.0  # to give much lent memory back takes seconds


class Closable(Protocol):
    """An object of the library. Its `close` holds Python's lock, so every thread waits for it."""

    def close(self) -> int: ...


class Owner(Protocol):
    """A client, which owns such an object. `close` waits for calls, `refuse` takes no new ones."""

    def refuse(self) -> None: ...
    def close(self, drain_s: float, close_s: float) -> None: ...
    def set_aside(self) -> None: ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_aside: list[Closable] = []
_hooks_lock = threading.Lock()
_hooks_are_set = False


def set_aside(raw: Closable) -> None:
    """Keeps an object that cannot be closed now: destroying it would crash or hang the process."""
    _aside.append(raw)


def close_in_time(raw: Closable, label: str, timeout_s: float = CLOSE_S) -> None:
    """Closes an object, or sets it aside after the time-out."""
    try:
        closer: AsyncRunner[int] = AsyncRunner("pdstore-mooncake-close")
    except RuntimeError:  # no thread can start; from Python 3.12 on that is so at exit
        raw.close()
        return
    closer.launch(raw.close)
    try:
        closer.sync(timeout_s)
    except TimeoutError:
        log.warning("%s: close did not end within %s s; left alone", label, timeout_s)
        set_aside(raw)
    closer.close(0.1)


def close_together(
    owners: Collection[Owner], drain_s: float = DRAIN_S, close_s: float = CLOSE_S
) -> None:
    """Closes all of them within `close_s`; in it the calls that run have one time to end.

    None takes new calls from the start: one that is busy for long would else leave the others at
    work until no time is left to wait for theirs.
    """
    for owner in owners:
        owner.refuse()
    drained, closed = Deadline(drain_s), Deadline(close_s)
    for owner in owners:
        with contextlib.suppress(StoreError):
            owner.close(drained.remaining_s(), closed.remaining_s())


def close_at_exit(owner: Owner) -> None:
    """Closes the owner before the interpreter ends; sets its object aside in forked children."""
    global _hooks_are_set
    _owners.add(owner)
    with _hooks_lock:
        if _hooks_are_set:
            return
        _hooks_are_set = True
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_set_all_aside)


def close_on_sigterm() -> None:
    """Makes SIGTERM close everything and then end the process as before.

    Meant for a process that lends memory: if it dies without a word, the master keeps sending
    others to it until the client's time to live is over. Changes nothing if the program has a
    handler of its own, which has to close what it opened, nor outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _close_all() -> None:
    close_together(list(_owners), _DRAIN_AT_EXIT_S, _CLOSE_AT_EXIT_S)


def _set_all_aside() -> None:
    for owner in list(_owners):
        owner.set_aside()


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    start = time.monotonic()
    _close_all()
    log.info("closed in %.1f s on signal %d", time.monotonic() - start, number)
    os.kill(os.getpid(), number)
