"""AsyncRunner: has a thread and a GPU stream, and runs functions on them, one at a time.

DevicePin keeps a thread on one device.
"""

# Decision: docs/decisions/038-async-runner.md
from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from pdstore.errors import DeviceError
from pdstore.threads import Worker

CPU = torch.device("cpu")


class CudaApi:
    """The CUDA calls that DevicePin makes through torch. Tests replace it by another object."""

    def set_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def current_device(self) -> int:
        return int(torch.cuda.current_device())

    def reset_stream(self, index: int) -> None:
        torch.cuda.set_stream(torch.cuda.default_stream(index))


class DevicePin:
    """Keeps a thread on one device. If the device is the CPU, it does nothing.

    Each thread has a current CUDA device. At first that is device 0, and any library may change it.
    So `hold` is called before every job: it makes `device` the thread's current device again, and
    the device's default stream the thread's current stream.

    Raises DeviceError for a device without an index.
    """

    def __init__(self, device: torch.device, api: CudaApi | None = None) -> None:
        if device.type != "cpu" and device.index is None:
            raise DeviceError(f"{device} has no index: name the device, for example cuda:0")
        self.device = device
        self._api = api or CudaApi()

    def hold(self) -> None:
        """Puts the calling thread on the device. After a DeviceError the thread must run no job."""
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


T = TypeVar("T")


class AsyncRunner(Generic[T]):
    """Has a thread and a GPU stream, and runs its caller's functions on them, one at a time.

    `launch` starts a function. `sync` waits for the function and returns its result. On a GPU, the
    work that the function queues runs after the work that was queued at `launch` on the caller's
    current stream of the runner's device. The function runs in the torch modes (inference,
    gradients) that the caller had at `launch`.
    If the function raises an exception, the next call of `sync` or `launch` raises it, and no later
    call does. That call also makes the caller's stream wait for the work that the function queued
    before it failed, so that the memory in use may be reused. Between `launch` and that call, the
    caller must not change data that the function uses: give the function copies.
    Only one thread may call `launch` and `sync`. Raises DeviceError if the device cannot be used.
    """

    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls: SimpleQueue[_Call[T] | None] = SimpleQueue()
        self._last: _Call[T] | None = None  # None after the caller learned its outcome
        self._closed = False
        self._worker = Worker(name, self._calls.get, DevicePin(device).hold)

    def launch(self, function: Callable[[], T], timeout_s: float = 30.0) -> None:
        """Waits until the previous function has ended, then starts `function`.

        Raises the previous function's exception, or TimeoutError if that function still runs after
        `timeout_s`.
        """
        self._ended(timeout_s)
        if self._closed:
            raise RuntimeError("the runner is closed")
        self._last = _Call(function, self._stream)
        self._calls.put(self._last)

    def sync(self, timeout_s: float = 30.0) -> T | None:
        """Waits for the function and returns its result.

        Returns None if no function was launched since the last call of `sync`. On a GPU, the
        caller's stream then waits for the work that the function queued.
        Raises the function's exception, or TimeoutError if it still runs after `timeout_s`.
        """
        call = self._ended(timeout_s)
        if call is None:
            return None
        call.follow()
        return call.result

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stops the thread after its function; returns False if it still runs after `timeout_s`."""
        self._closed = True
        self._calls.put(None)
        return self._worker.join(timeout_s)

    def _ended(self, timeout_s: float) -> _Call[T] | None:
        """Waits for the last call and raises its exception. None if there is no such call."""
        call = self._last
        if call is None:
            return None
        if not call.has_ended.wait(timeout_s):
            raise TimeoutError(f"the function still runs after {timeout_s} s")
        self._last = None
        if call.error is not None:
            call.follow()
            raise call.error
        return call


class _Call(Generic[T]):
    """A launched function and its outcome. It drops the function before it sets `has_ended`."""

    def __init__(self, function: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        self.has_ended = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None
        self._function: Callable[[], T] | None = function
        self._stream = stream
        self._asked: torch.cuda.Event | None = None  # behind the caller's earlier work
        self._ready: torch.cuda.Event | None = None  # behind the function's work
        if stream is not None:
            self._asked = torch.cuda.current_stream(stream.device).record_event()
        self._is_inference = torch.is_inference_mode_enabled()
        self._has_grad = torch.is_grad_enabled()

    def run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad):
            self.result = self._run(function)
        del function
        self.has_ended.set()

    def fail(self, error: Exception) -> None:
        self._function = None
        self.error = error.with_traceback(None)
        self.has_ended.set()

    def follow(self) -> None:
        """Makes the caller's stream wait for the work that the function queued."""
        if self._stream is not None and self._ready is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._ready)

    def _run(self, function: Callable[[], T]) -> T:
        if self._stream is None:
            return function()
        with torch.cuda.stream(self._stream):
            if self._asked is not None:
                self._stream.wait_event(self._asked)
            try:
                return function()
            finally:  # work that a failed function queued still runs
                self._ready = self._stream.record_event()
