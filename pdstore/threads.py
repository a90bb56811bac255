"""Threads with a name and a device, whose errors are kept and whose end is waited for."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from pdstore.errors import DeviceError

T = TypeVar("T")
log = logging.getLogger(__name__)


def call_or(function: Callable[[], T], otherwise: T) -> T:
    """Returns what `function` returns; if it raises, logs the error and returns `otherwise`."""
    try:
        return function()
    except BaseException:
        log.exception("%r failed", function)
        return otherwise


class Task(Protocol):
    """Work for a Worker, which calls `run`, and calls `fail` with what `run` raises."""

    def run(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Worker:
    """A thread that runs tasks one after the other until `take` returns None.

    An exception of a task, or of `hold` before it, goes to the task's `fail`, and the worker goes
    on. A BaseException, which a library may raise on any thread (CancelledError, a panic of Rust),
    arrives at `fail` as a RuntimeError. Raises DeviceError from the constructor when the device
    cannot be used.

    hold: called before each task to put the thread on its device: `DevicePin.hold`.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Task | None],
        hold: Callable[[], None] = lambda: None,
    ) -> None:
        self._take = take
        self._hold = hold
        self._started = threading.Event()
        self._start_error: DeviceError | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            self._hold()
        except DeviceError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        while (task := self._take()) is not None:
            try:
                self._hold()
                task.run()
            except BaseException as error:
                log.debug("%s: task failed", self._thread.name, exc_info=True)
                task.fail(_as_exception(error))
            del task  # what the task holds is released before the thread waits for the next one


class Ticker:
    """A thread that calls `step` again and again, until `stop`.

    `step` returns the seconds to its next turn, or None to wait for `wake`. If `step` raises, the
    error is logged, and the next turn comes after `pause_s`. In the child of a fork `wake` and
    `stop` do nothing. A turn is one call of `step`; there are never two turns at a time.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], *, pause_s: float = 1.0
    ) -> None:
        self._step = step
        self._pause_s = pause_s
        self._called = threading.Event()
        self._stopped = False
        self._turning = threading.Lock()
        self._next_at = 0.0  # when the thread makes its next turn if nobody wakes it
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the next turn come at once."""
        if os.getpid() == self._pid:
            self._called.set()

    def turn(self) -> None:
        """Makes a turn on the calling thread, which is quicker than waking the ticker's thread."""
        with self._turning:
            if self._turn() < self._next_at:
                self.wake()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its turn; False if it, or a turn on another thread, still runs."""
        self._stopped = True
        if os.getpid() != self._pid:
            return True
        self._called.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._turning.locked()

    def _loop(self) -> None:
        while not self._stopped:
            with self._turning:
                self._next_at = self._turn()
            pause = self._next_at - time.monotonic()
            self._called.wait(None if pause == math.inf else max(0.0, pause))
            self._called.clear()  # the next turn serves all wakes so far

    def _turn(self) -> float:
        """Makes a turn unless stopped; returns when the next is due. The caller holds the lock."""
        after_an_error: float | None = self._pause_s
        pause = None if self._stopped else call_or(self._step, after_an_error)
        return math.inf if pause is None else time.monotonic() + pause


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} on a thread of pdstore: {error}")
    wrapped.__cause__ = error
    return wrapped


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def is_over(self) -> bool:
        return time.monotonic() >= self.at
