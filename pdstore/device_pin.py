"""DevicePin: keeps a thread on its device."""

from __future__ import annotations

from typing import Protocol

import torch

from pdstore.errors import DeviceError

CPU = torch.device("cpu")


class DeviceApi(Protocol):
    """The calls of a device runtime that pinning needs. Tests give their own."""

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
    """Keeps a thread on one device. On the CPU it does nothing.

    Each thread has a current device, at first 0, and any library may change it: so it is set again
    before every job, and the thread's current stream is set back to the default one.

    Raises DeviceError for a device without an index.
    """

    def __init__(self, device: torch.device, api: DeviceApi | None = None) -> None:
        if device.type != "cpu" and device.index is None:
            raise DeviceError(f"{device} has no index: name the device, for example cuda:0")
        self.device = device
        self._api = api or CudaApi()

    def hold(self) -> None:
        """Puts the calling thread on the device. Raises DeviceError: then nothing may run there."""
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
