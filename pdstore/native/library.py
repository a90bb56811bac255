"""libpdstore as Python sees it: the library, engines, tickets."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from ctypes import byref, c_char, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from pdstore.errors import ConfigError, LayoutError, NativeError, SwapError
from pdstore.native.abi import (
    ABI,
    SIGNATURES,
    Code,
    CopyPath,
    CopyPlan,
    Error,
    Info,
    Item,
    Options,
    PartShape,
    Plan,
    PumpStats,
    Region,
    Stats,
    raise_error,
)
from pdstore.native.build import find_library
from pdstore.settings import Settings

log = logging.getLogger(__name__)


class Library:
    """A loaded libpdstore. Raises NativeError for a file that is none, or of another ABI."""

    def __init__(self, path: Path) -> None:
        try:
            self.calls = ctypes.CDLL(str(path))
            # Calls that are over at once keep Python's lock: a busy engine gives it back late.
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
        """Pins host memory for a device, in one piece. Raises SwapError or DeviceError."""
        error = Error()
        self.calls.pds_register(device, address, num_bytes, byref(error))
        raise_error(error)

    def unregister(self, device: int, address: int) -> None:
        """Undoes one `register`. Raises SwapError."""
        error = Error()
        self.calls.pds_unregister(device, address, byref(error))
        raise_error(error)

    def populate(self, address: int, num_bytes: int) -> None:
        """Makes the pages of a range present; several threads at once are faster."""
        self.calls.pds_populate(address, num_bytes)

    def read_files(
        self, paths: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], int]:
        """Reads whole files in turn, each of at least 64 bytes, until one cannot be read.

        Returns the `block.checksum` of each that was read, and why it stopped: 0, an errno, or
        OTHER_LENGTH.
        """
        count, done, why = len(paths), c_int64(), c_int32()
        to, wanted = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        sums, ends = (c_uint64 * count)(), (byref(done), byref(why))
        if self.calls.pds_read_files(_joined(paths), to, wanted, count, sums, *ends):
            raise ValueError("a file of fewer bytes than a header, or no address")
        return list(sums[: done.value]), why.value

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

    def write_files(
        self,
        temporary: str,
        paths: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> tuple[int, int]:
        """Writes whole files in turn, each of at least 64 bytes, until one cannot be written.

        Each gets its `block.checksum` in its header. A file that is there stays and counts as
        written. Returns how many were written, and why it stopped: 0 or an errno.

        temporary: a path on the same file system that nobody else uses; nothing is left there.
        """
        count, done, why = len(paths), c_int64(), c_int32()
        of, given = (c_uint64 * count)(*addresses), (c_int64 * count)(*sizes)
        names, ends = (os.fsencode(temporary), _joined(paths)), (byref(done), byref(why))
        if self.calls.pds_write_files(*names, of, given, count, *ends):
            raise ValueError("a value of fewer bytes than a header, or no address")
        return done.value, why.value

    def exchange_capture_mode(self, mode: int) -> int:
        """Sets the calling thread's capture mode (RELAXED or an earlier result); the one before."""
        before = c_int32(mode)
        self.calls.pds_exchange_capture_mode(byref(before))
        return before.value


class Engine:
    """One engine: block copies of one device and one layout. Any thread may call it.

    options: of the struct's fields, those that are not 0.
    Raises LayoutError, DeviceError or SwapError.
    """

    def __init__(
        self,
        library: Library,
        options: dict[str, int],
        parts: Sequence[ctypes.Structure],
        regions: Sequence[ctypes.Structure],
    ) -> None:
        self._library, self._calls = library, library.calls
        self._lock = threading.Lock()  # nobody may be in a call when the handle ends
        self._pid = os.getpid()
        self._handle = c_void_p()
        counts = {"abi": ABI, "num_parts": len(parts), "num_regions": len(regions)}
        error = Error()
        self._calls.pds_open(
            byref(Options(**counts, **options)),
            (PartShape * len(parts))(*parts),
            (Region * len(regions))(*regions),
            byref(self._handle),
            byref(error),
        )
        raise_error(error)

    def add_host(self, address: int, num_bytes: int) -> None:
        """From now on payloads lie in one of the added ranges each."""
        with self._lock:
            self._calls.pds_add_host(self._open(), address, num_bytes)

    def explain(self, part: int, num_tokens: int) -> CopyPlan:
        """The path of payloads of a part with this many tokens."""
        plan = Plan()
        with self._lock:
            code = self._calls.pds_explain(self._open(), part, num_tokens, byref(plan))
        if code:
            raise LayoutError(f"no payload of {num_tokens} tokens of part {part}")
        path = CopyPath(plan.path).name
        return CopyPlan(
            path, plan.num_pieces, plan.piece_bytes, plan.block_bytes, plan.why.decode()
        )

    def stats(self, direction: int) -> PumpStats:
        """What the thread of a direction (0: cache -> slots) has done."""
        stats = Stats()
        with self._lock:
            self._calls.pds_get_stats(self._open(), direction, byref(stats))
        return PumpStats(stats.bytes, stats.slices, stats.cpu_ns / 1e9)

    def submit(
        self,
        direction: int,
        items: bytes,
        ids: bytes,
        *,
        stream: int = 0,
        ready: int = 0,
    ) -> Ticket:
        """Starts a copy; `items` and `ids` are packed `Item` and int64."""
        handle, error = c_void_p(), Error()
        num_items, num_ids = len(items) // ctypes.sizeof(Item), len(ids) // 8
        out = byref(handle), byref(error)
        with self._lock:
            self._library.short_calls.pds_submit(
                self._open(), direction, items, num_items, ids, num_ids, stream, ready, *out
            )
        raise_error(error)
        return Ticket(self._library, handle)

    def close(self) -> None:
        """Ends what is queued, waits for the device, frees everything. Twice is fine.

        In the child of a fork it does nothing: the parent may have been in a call.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            handle, self._handle = self._handle, c_void_p()
            if handle:
                self._calls.pds_close(handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise SwapError("the swap engine is closed")
        return self._handle


class Ticket:
    """A copy that was started. It goes on when this is dropped."""

    def __init__(self, library: Library, handle: c_void_p) -> None:
        self._calls, self._short_calls, self._handle = library.calls, library.short_calls, handle
        self._pid = os.getpid()

    def wait(self, timeout_s: float) -> bool:
        """True when the copy is done, False after the time; raises SwapError when it failed."""
        error = Error()
        code = self._calls.pds_wait(self._handle, int(timeout_s * 1e6), byref(error))
        if code == Code.PENDING:
            return False
        raise_error(error)
        return True

    @property
    def done(self) -> bool:
        """The copy is done; raises SwapError when it failed."""
        return self.wait(0)

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._short_calls.pds_free_ticket(self._handle)


def _joined(paths: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def address_of(view: memoryview) -> int:
    """Where a writable buffer's first byte is."""
    return _addressof(_first_byte(view))


_addressof, _first_byte = ctypes.addressof, c_char.from_buffer


def load_library(settings: Settings, *, for_gpu: bool) -> Library | None:
    """The native library, as PDSTORE_NATIVE says; None: there is none, and a line says why.

    for_gpu: the copies are of a GPU's memory; else the CPU form, quicker to build, will do.

    Raises ConfigError where it is required and missing.
    """
    if settings.native == "off":
        return None
    try:
        library = _load(for_gpu)
        if for_gpu and not library.num_devices:
            why = "sees no GPU (driver older than its CUDA?)" if library.has_cuda else "is for CPUs"
            raise NativeError(f"{library.path} {why}")
        return library
    except NativeError as error:
        if settings.native == "require":
            raise ConfigError(f"PDSTORE_NATIVE=require: {error}") from error
        _say_once(str(error))
        return None


def _load(for_gpu: bool) -> Library:
    """Loads a build once; where the one for GPUs is loaded, it serves host memory too."""
    library = _loaded.get(True) or _loaded.get(for_gpu)
    if library is None:
        library = _loaded[for_gpu] = Library(find_library(with_cuda=for_gpu))
    return library


_loaded: dict[bool, Library] = {}  # by whether it was asked for GPUs


@cache
def _say_once(why: str) -> None:
    log.warning("block copies go through torch: %s", why)
