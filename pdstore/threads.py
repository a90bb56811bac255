"""The one place that starts threads: each has a name, a device, a kept error and a bounded join."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from pdstore.errors import DeviceError

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


class DeviceApi(Protocol):
    """What pinning needs of a device runtime. A test gives its own."""

    def set_device(self, index: int) -> None: ...
    def current_device(self) -> int: ...
    def reset_stream(self, index: int) -> None: ...


class CudaApi:
    """The CUDA runtime, through torch."""

    def set_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def current_device(self) -> int:
        return int(torch.cuda.current_device())

    def reset_stream(self, index: int) -> None:
        torch.cuda.set_stream(torch.cuda.default_stream(index))


class DevicePin:
    """Keeps a thread on one device; for the CPU, an explicit device, there is nothing to do.

    A thread's current device is its own and starts at 0, and anyone may change it: so it is looked
    at before every job, and the thread's current stream is put back to the default one.

    Raises DeviceError for a device without an index.
    """

    def __init__(self, device: torch.device, api: DeviceApi | None = None) -> None:
        if device.type != "cpu" and device.index is None:
            raise DeviceError(f"{device} has no index: name the device, for example cuda:0")
        self.device = device
        self._api = api or CudaApi()

    def hold(self) -> None:
        """Puts the calling thread on the device. Raises DeviceError; then nothing may run there."""
        if self.device.type == "cpu":
            return
        index = self.device.index
        try:
            if self._api.current_device() != index:
                self._api.set_device(index)
            if self._api.current_device() != index:
                raise DeviceError(f"the thread stays on another device than {self.device}")
            self._api.reset_stream(index)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise DeviceError(f"cannot use {self.device}: {error}") from error


def call_each(functions: Iterable[Callable[[], None]]) -> None:
    """Calls all of them; an exception of one is logged and keeps no other from its turn."""
    for function in functions:
        _call_logged(function)


def _call_logged(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        log.exception("%r failed", function)


class Task(Protocol):
    """One piece of work of a Worker."""

    def run(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Worker:
    """A thread that runs tasks one after the other until `take` returns None.

    An exception of a task, or of pinning the device before it, goes to the task's `fail`; the
    worker goes on. Raises DeviceError from the constructor when the device cannot be used.
    """

    def __init__(
        self, name: str, take: Callable[[], Task | None], pin: DevicePin | None = None
    ) -> None:
        self._take = take
        self._pin = pin or DevicePin(CPU)
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
            self._pin.hold()
        except DeviceError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        while (task := self._take()) is not None:
            try:
                self._pin.hold()
                task.run()
            except Exception as error:
                log.debug("%s: task failed", self._thread.name, exc_info=True)
                task.fail(error)
            del task  # what the task holds is released before the thread waits for the next one


class Ticker:
    """A thread that calls `step` again and again, until `stop`.

    `step` returns the seconds to its next turn, or None to wait for `wake`. An exception of `step`
    is logged, and the thread goes on a second later.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._step = step
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the next turn come at once."""
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its turn; False if it still runs."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while not self._stopped:
            try:
                pause = self._step()
            except Exception:
                log.exception("%s failed; it goes on", self._thread.name)
                pause = 1.0
            self._wake.wait(pause)
            self._wake.clear()


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def is_over(self) -> bool:
        return time.monotonic() >= self.at
