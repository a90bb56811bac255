"""Library: a loaded libpdstore, and load_library, which finds or builds it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int32, c_int64, c_uint8, c_uint64
from pathlib import Path

from pdstore.errors import ConfigError, NativeError
from pdstore.native.abi import ABI, SIGNATURES, Error, Info, raise_error
from pdstore.native.build import find_built, find_library
from pdstore.settings import Settings

log = logging.getLogger(__name__)


class Library:
    """A loaded libpdstore. Raises NativeError for a file that is not one or has another ABI."""

    def __init__(self, path: Path) -> None:
        try:
            self.calls = ctypes.CDLL(str(path))
            # Short calls keep Python's lock: getting it back from a busy engine takes long.
            self.short_calls = ctypes.PyDLL(str(path))
        except OSError as error:
            raise NativeError(f"cannot load {path}: {error}") from error
        self.path = path
        info = Info()
        self.calls.pds_info(byref(info))
        if info.abi != ABI:
            raise NativeError(f"{path} has ABI {info.abi}, expected {ABI}: build it again")
        for name, kinds in SIGNATURES.items():
            for calls in (self.calls, self.short_calls):
                getattr(calls, name).argtypes = kinds
        self.has_cuda = bool(info.has_cuda)
        self.num_devices = int(info.num_devices)
        self.has_faults = bool(info.has_faults)

    def register(self, device: int, address: int, num_bytes: int) -> None:
        """Pins a range of host memory for a device. Raises SwapError or DeviceError."""
        error = Error()
        self.calls.pds_register(device, address, num_bytes, byref(error))
        raise_error(error)

    def unregister(self, device: int, address: int) -> None:
        """Unpins the range that was registered at this address. Raises SwapError."""
        error = Error()
        self.calls.pds_unregister(device, address, byref(error))
        raise_error(error)

    def populate(self, address: int, num_bytes: int) -> None:
        """Faults in the pages of a range; faster when several threads share the work."""
        self.calls.pds_populate(address, num_bytes)

    def sum_values(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Returns the `block.checksum` of each value in memory, all in one call.

        Raises ValueError for a value of fewer than 64 bytes.
        """
        count = len(addresses)
        sums = (c_uint64 * count)()
        places, lengths = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        if self.calls.pds_sum_values(places, lengths, count, sums):
            raise ValueError("a value of fewer bytes than a header, or no address")
        return list(sums)

    def find_files(self, paths: Sequence[str]) -> list[bool]:
        """Returns True for each path that has a file."""
        found = (c_uint8 * len(paths))()
        self.calls.pds_find_files(joined(paths), len(paths), found)
        return list(map(bool, bytes(found)))

    def lease_files(self, paths: Sequence[str], used_ns: int, until_ns: int) -> tuple[int, int]:
        """Sets the access and modification times of files in turn, until one errs.

        Links are not followed. Returns how many were set, and why it stopped: 0 or an errno.
        """
        done, why = c_int64(), c_int32()
        ends = (byref(done), byref(why))
        if self.calls.pds_lease_files(joined(paths), len(paths), used_ns, until_ns, *ends):
            raise ValueError("a time before 1970")
        return done.value, why.value

    def exchange_capture_mode(self, mode: int) -> int:
        """Sets the calling thread's CUDA graph capture mode and returns the previous one."""
        before = c_int32(mode)
        self.calls.pds_exchange_capture_mode(byref(before))
        return before.value


def joined(paths: Sequence[str]) -> bytes:
    """Returns paths as the library takes them: a zero after each."""
    return os.fsencode("\0".join(paths)) + b"\0"


def address_of(view: memoryview) -> int:
    """The address of a writable buffer's first byte."""
    return _addressof(_first_byte(view))


_addressof, _first_byte = ctypes.addressof, c_char.from_buffer


class LibraryLoader:
    """Finds or builds the library, and loads each form of it once.

    find: as `find_library`. find_built: as the function of this name.
    """

    def __init__(
        self,
        find: Callable[..., Path] = find_library,
        find_built: Callable[[], Path | None] = find_built,
    ) -> None:
        self._find = find
        self._find_built = find_built
        self._has_looked = False
        self._loaded: dict[bool, Library] = {}  # by whether it was asked for GPUs
        self._missing: dict[bool, str] = {}  # why there is none: another try would fail as slowly
        self._warned: set[str] = set()

    def load(self, settings: Settings, *, for_gpu: bool) -> Library | None:
        """The native library; None, after one warning with the reason, where there is none.

        for_gpu: the copies are of a GPU's memory. The form for host memory is quicker to build.
        Returns None for PDSTORE_NATIVE=off. Raises ConfigError for PDSTORE_NATIVE=require without a
        library.
        """
        if settings.native == "off":
            return None
        try:
            library = self._load(for_gpu)
            if for_gpu and not library.num_devices:
                why = "finds no GPU (is the driver older than its CUDA?)"
                why = why if library.has_cuda else "was built without CUDA"
                raise NativeError(f"{library.path} {why}")
            return library
        except NativeError as error:
            if settings.native == "require":
                raise ConfigError(f"PDSTORE_NATIVE=require: {error}") from error
            if str(error) not in self._warned:
                self._warned.add(str(error))
                log.warning("block copies go through torch: %s", error)
            return None

    def built(self, settings: Settings) -> Library | None:
        """The library for host memory if nothing need be built for it; else None, and no warning.

        For threads that must not wait for a compiler. It looks for a build once in a process.
        """
        if settings.native == "off":
            return None
        if not self._loaded and not self._has_looked:
            self._has_looked = True
            path = self._find_built()
            if path is not None:
                with contextlib.suppress(NativeError):  # `load` gives the reason
                    self._loaded[False] = Library(path)
        return self._loaded.get(True) or self._loaded.get(False)

    def _load(self, for_gpu: bool) -> Library:
        """Looks for a form once in a process; that for GPUs serves host memory too."""
        library = self._loaded.get(True) or self._loaded.get(for_gpu)
        if library is not None:
            return library
        if for_gpu not in self._missing:
            try:
                self._loaded[for_gpu] = Library(self._find(with_cuda=for_gpu))
                return self._loaded[for_gpu]
            except NativeError as error:
                self._missing[for_gpu] = str(error)
        raise NativeError(self._missing[for_gpu])


_loader = LibraryLoader()
load_library, built_library = _loader.load, _loader.built
"""Give the library that all of this process shares; see `LibraryLoader`."""
