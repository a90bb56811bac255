"""Worker, Ticker, CallBeside: named threads that survive errors. Deadline."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

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
    """Work for a Worker, which calls `run`. It passes an exception that `run` raises to `fail`."""

    def run(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Worker:
    """A thread that runs tasks one after the other until `take` returns None.

    If a task or the `hold` before it raises an exception, the worker passes the exception to the
    task's `fail`, and goes on with the next task. In place of a BaseException such as
    CancelledError or a panic of Rust, `fail` gets a RuntimeError. The constructor raises
    DeviceError if the device cannot be used.

    hold: is called before each task to put the thread on its device, as `DevicePin.hold` does.
    """

    def __init__(
        self, name: str, take: Callable[[], Task | None], hold: Callable[[], None] = lambda: None
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
        """Waits for the thread's end; returns False if it still runs after `timeout_s`."""
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
            del task  # drop the task's objects before waiting for the next task


class Ticker:
    """A thread that calls `step` again and again until `stop` is called.

    A turn is one call of `step`; two turns never run at the same time. `step` returns the seconds
    until the next turn, or None if the next turn must wait for `wake`. If `step` raises an
    exception, the exception is logged, and the next turn comes after a second. In the child of a
    fork, `wake` and `stop` do nothing.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._step = step
        self._called = threading.Event()
        self._stopped = False
        self._turning = threading.Lock()
        self._next_at = 0.0  # when the thread makes its next turn if nobody wakes it
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread begin its next turn at once."""
        if os.getpid() == self._pid:
            self._called.set()

    def turn(self) -> None:
        """Calls `step` on the calling thread, which is quicker than waking the ticker's thread."""
        with self._turning:
            if self._turn() < self._next_at:
                self.wake()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its turn; False if any turn still runs after `timeout_s`."""
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
            self._called.clear()  # the next turn answers all wakes so far

    def _turn(self) -> float:
        """Calls `step` unless stopped; returns the next turn's time. The caller holds the lock."""
        after_an_error: float | None = 1.0
        pause = None if self._stopped else call_or(self._step, after_an_error)
        return math.inf if pause is None else time.monotonic() + pause


class CallBeside(Generic[T]):
    """A call of `function` on a thread of its own, which its caller may stop waiting for.

    The call goes on until `function` returns, whether somebody waits for it or not.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` for the end of the call; returns True if it has ended."""
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        """Returns what the call returned, or raises its exception. The call must have ended."""
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def _run(self) -> None:
        assert self._function is not None
        try:
            self._answers.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._function = None
            self._ended.set()


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} on a thread of pdstore: {error}")
    wrapped.__cause__ = error
    return wrapped


class Deadline:
    """A point in time on the monotonic clock, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def is_over(self) -> bool:
        return time.monotonic() >= self.at
