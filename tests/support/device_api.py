"""FakeApi: a device runtime on paper."""

from __future__ import annotations

import threading
from collections import deque


class FakeApi:
    """A device runtime on paper: a current device per thread, and failures on demand."""

    def __init__(self, num_devices: int = 2) -> None:
        self.num_devices = num_devices
        self.calls: list[str] = []
        self.failures: deque[str] = deque()
        self._local = threading.local()

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, index: int) -> None:
        self.calls.append(f"set {index}")
        if self.failures and self.failures[0] == "set":
            self.failures.popleft()
            raise RuntimeError("driver says no")
        if index >= self.num_devices:
            raise RuntimeError("invalid device ordinal")
        self._local.device = index

    def reset_stream(self, index: int) -> None:
        self.calls.append(f"stream {index}")
        if self.failures and self.failures[0] == "stream":
            self.failures.popleft()
            raise RuntimeError("no stream")
