"""Library: libpdstore, called by ctypes (csrc/pdstore.h). load_library: finds or builds it."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

from pdstore.errors import ConfigError, DeviceError, LayoutError, NativeError, SwapError
from pdstore.native.build import find_built, find_library
from pdstore.settings import Settings

log = logging.getLogger(__name__)

ABI = 28
CPU = -1
RELAXED = 2
"""The CUDA capture mode in which a thread's calls do not disturb other threads' graph captures."""


class CopyPath(enum.IntEnum):
    """Ways of copying a payload; with AUTO the engine chooses one of the others."""

    AUTO = 0
    BATCH = 1
    STRIDED = 2
    STAGE = 3


class FileWay(enum.IntEnum):
    """Ways in which the bytes of files are moved: through the page cache, or past it.

    DIRECT uses io_uring, or threads where that is refused; DIRECT_BY_THREADS uses threads always.
    """

    CACHED = 0
    DIRECT = 1
    DIRECT_BY_THREADS = 2


class Code(enum.IntEnum):
    OK = 0
    PENDING = 1
    ARGUMENT = 2
    DEVICE = 3
    POISONED = 4
    CLOSED = 5
    CAPTURE = 6
    NO_DEVICE = 7
    MEMORY = 8
    TIMEOUT = 9
    FULL = 10
    FORMAT = 11
    SYSTEM = 12
    LENGTH = 13
    VALUE = 14


_KINDS = {"i32": c_int32, "i64": c_int64, "u64": c_uint64, "bytes": c_char_p}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """Makes a struct of pdstore.h from words `name:type`; a number as type is a text's length."""
    pairs = [word.split(":") for word in fields.split()]
    kinds = [(n, c_char * int(k) if k.isdigit() else _KINDS[k]) for n, k in pairs]
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


Region = _struct(
    "Region",
    "base:u64 block_stride:i64 token_stride:i64 head_stride:i64 width:i64 start:i64 layer:i32"
    " part:i32",
)
PartShape = _struct(
    "PartShape",
    "num_layers:i32 num_heads:i32 cell:i64 num_blocks:i64 block_tokens:i32 max_tokens:i32",
)
Options = _struct(
    "Options",
    "abi:i32 device:i32 path:i32 num_parts:i32 num_regions:i32 copy_out_bytes:i64 copy_in_bytes:i64"
    " stage_out_bytes:i64 stage_in_bytes:i64",
)
Item = _struct("Item", "payload:u64 part:i32 num_tokens:i32 first_token:i32 num_ids:i32")
Error = _struct("Error", "code:i32 device_code:i32 slice:i64 call:40 message:200")
Info = _struct("Info", "abi:i32 has_cuda:i32 num_devices:i32")
Plan = _struct("Plan", "path:i32 num_pieces:i32 piece_bytes:i64 block_bytes:i64 why:104")

ArenaOptions = _struct(
    "ArenaOptions",
    "lease_ns:i64 fresh_ns:i64 short_lived_ns:i64 orphan_timeout_ns:i64 lock_timeout_ns:i64",
)
ArenaInfo = _struct("ArenaInfo", "data_at:i64 data_bytes:i64 slab_bytes:i64")
ArenaValue = _struct("ArenaValue", "bytes:i64 age_ns:i64 key:208")
SlotCounts = _struct("SlotCounts", "stored:i64 reserved:i64 resting:i64 free:i64 slabs:i64")

Values = _struct(
    "Values",
    "keys:bytes starts:bytes sizes:bytes ids:bytes items:bytes count:i64 num_ids:i64"
    " lock_timeout_ns:i64 memory:u64 ready:u64",
)

_P = c_void_p
SIGNATURES: dict[str, list[object]] = {
    "pds_info": [_P],
    "pds_open": [_P, _P, _P, _P, _P],
    "pds_close": [_P],
    "pds_stop": [_P],
    "pds_add_host": [_P, c_uint64, c_int64],
    "pds_explain": [_P, c_int32, c_int32, c_int32, _P],
    "pds_submit": [_P, c_int32, _P, c_int64, _P, c_int64, c_uint64, c_uint64, _P, _P],
    "pds_wait": [_P, c_int64, _P],
    "pds_free_ticket": [_P],
    "pds_register": [c_int32, c_uint64, c_int64, _P],
    "pds_unregister": [c_int32, c_uint64, _P],
    "pds_populate": [c_uint64, c_int64],
    "pds_exchange_capture_mode": [_P],
    "pds_read_values": [_P, c_int32, c_char_p, c_char_p, c_char_p, c_char_p, c_int64],
    "pds_sum_values": [_P, _P, c_int64, _P],
    "pds_write_values": [_P, c_int32, *[c_char_p] * 5, c_int64, _P, _P],
    "pds_read_files": [c_int32, *[c_char_p] * 3, c_int64, _P, _P],
    "pds_write_files": [c_int32, *[c_char_p] * 4, c_int64, _P, _P],
    "pds_try_ring": [_P],
    "pds_find_files": [c_char_p, c_int64, _P],
    "pds_stat_files": [c_char_p, c_int64, _P],
    "pds_delete_files": [c_char_p, c_int64, _P, _P],
    "pds_lease_files": [c_char_p, c_int64, c_int64, c_int64, _P, _P],
    "pds_arena_format": [c_int32, c_int64, c_int64, c_uint64],
    "pds_arena_open": [c_int32, _P, _P, _P],
    "pds_arena_close": [_P],
    "pds_arena_free": [_P],
    "pds_arena_find": [_P, c_int64, c_char_p, c_int64, c_int32, c_int64, c_int64, _P],
    "pds_arena_use": [_P, c_char_p, c_int64],
    "pds_arena_remove": [_P, c_char_p, c_int64],
    "pds_arena_clear": [_P, c_char_p],
    "pds_arena_count": [_P, _P],
    "pds_arena_oldest": [_P, c_int64, c_int64, _P],
    "pds_arena_make_room": [_P, c_char_p, c_char_p, _P, c_int64],
    "pds_arena_list": [_P, _P, _P, c_int64, _P],
    "pds_arena_put": [_P, c_int64, c_uint64, c_char_p, c_char_p, _P, _P, c_int64, _P],
    "pds_arena_get": [_P, c_uint64, c_char_p, _P, _P, c_int64, c_int32, _P],
    "pds_arena_fill": [_P, _P, _P, c_int64, c_char_p, _P, _P, _P],
    "pds_arena_take": [_P, _P, _P, _P, _P],
    "pds_arena_confirm": [_P, _P, _P, _P],
    "pds_arena_wait": [_P, c_uint32, c_int64, _P],
}


def raise_error(error: ctypes.Structure) -> None:
    """Raises the exception that fits an `Error`; does nothing if its code is OK."""
    code = Code(error.code)
    message = error.message.decode(errors="replace")
    if code is Code.OK:
        return
    if code is Code.ARGUMENT:
        raise LayoutError(message)
    if code is Code.NO_DEVICE:
        raise DeviceError(message)
    call = error.call.decode()
    place = f" (error {error.device_code} of {call}, slice {error.slice})" if call else ""
    raise SwapError(
        message + place,
        device_code=error.device_code,
        call=call,
        slice_number=error.slice,
        poisoned=code is Code.POISONED,
    )


def checked(call: Callable[..., int], *arguments: object) -> int:
    """Calls a function of the library whose last argument is an `Error`, and raises that error."""
    error = Error()
    code = call(*arguments, byref(error))
    raise_error(error)
    return code


class Library:
    """A loaded libpdstore. Raises NativeError for a file that is none, or has another ABI."""

    def __init__(self, path: Path) -> None:
        try:
            self.calls = ctypes.CDLL(str(path))
            # Short calls keep the GIL: beside a busy engine they would get it back late.
            self.calls_holding_gil = ctypes.PyDLL(str(path))
        except OSError as error:
            raise NativeError(f"cannot load {path}: {error}") from error
        self.path = path
        info = Info()
        self.calls.pds_info(byref(info))
        if info.abi != ABI:
            raise NativeError(f"{path} has ABI {info.abi}, expected {ABI}: build it again")
        for name, kinds in SIGNATURES.items():
            for calls in (self.calls, self.calls_holding_gil):
                getattr(calls, name).argtypes = kinds
        self.has_cuda = bool(info.has_cuda)
        self.num_devices = int(info.num_devices)

    def register(self, device: int, address: int, num_bytes: int) -> None:
        """Pins a range of host memory for copies of a device. Raises SwapError or DeviceError."""
        checked(self.calls.pds_register, device, address, num_bytes)

    def unregister(self, device: int, address: int) -> None:
        """Unpins the range that `register` pinned at this address. Raises SwapError."""
        checked(self.calls.pds_unregister, device, address)

    def populate(self, address: int, num_bytes: int) -> None:
        """Makes the memory pages of a range present; it is faster on several threads at once."""
        self.calls.pds_populate(address, num_bytes)

    def sum_values(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Returns the `block.checksum` of each value in memory, by one call of the library.

        Raises ValueError for a value of fewer than 64 bytes.
        """
        count = len(addresses)
        sums = (c_uint64 * count)()
        places = (c_uint64 * count)(*addresses)
        lengths = (c_int64 * count)(*sizes)
        if self.calls.pds_sum_values(places, lengths, count, sums):
            raise ValueError("a value of fewer bytes than a header, or no address")
        return list(sums)

    def read_files(
        self, way: FileWay, paths: Sequence[str], addresses: bytes, sizes: bytes
    ) -> tuple[int, int]:
        """Reads whole files to their addresses, in turn, until one cannot be read.

        addresses, sizes: packed, 64 bits for each number.
        Returns how many leading files were read, and 0 or what is wrong with the next one: an
        errno, or -1 for another length. Raises MemoryError.
        """
        done = c_int64()
        why = c_int32()
        ends = (byref(done), byref(why))
        if self.calls.pds_read_files(way, joined(paths), addresses, sizes, len(paths), *ends):
            raise MemoryError
        return done.value, why.value

    def write_files(
        self, way: FileWay, temporary: str, paths: Sequence[str], addresses: bytes, sizes: bytes
    ) -> tuple[int, int]:
        """Writes values to files as `Engine.write_values` does, but as they are, headers too.

        Raises MemoryError.
        """
        done = c_int64()
        why = c_int32()
        names = os.fsencode(temporary), joined(paths)
        ends = (byref(done), byref(why))
        if self.calls.pds_write_files(way, *names, addresses, sizes, len(paths), *ends):
            raise MemoryError
        return done.value, why.value

    def why_no_ring(self) -> int:
        """Returns 0 if this thread can use io_uring, else the errno with which it is refused."""
        why = c_int32()
        if self.calls.pds_try_ring(byref(why)):
            raise MemoryError
        return why.value

    def find_files(self, paths: Sequence[str]) -> list[bool]:
        """Returns for each path whether a file exists there."""
        found = (c_uint8 * len(paths))()
        self.calls.pds_find_files(joined(paths), len(paths), found)
        return list(map(bool, bytes(found)))

    def stat_files(self, paths: Sequence[str]) -> Iterator[tuple[int, int, int]]:
        """Returns the bytes, and the modification and access times in ns, of each file.

        For a missing file and a directory these are -1, 0, 0; for a file that fails, -1, the errno
        and 0. Follows no link.
        """
        facts = (c_int64 * (3 * len(paths)))()
        self.calls.pds_stat_files(joined(paths), len(paths), facts)
        return struct.iter_unpack("3q", facts)

    def delete_files(self, paths: Sequence[str], changed_ns: Sequence[int]) -> list[int]:
        """Deletes the files that have these modification times; returns an errno, or 0, for each.

        EBUSY stands for a file with another time. Follows no link.
        """
        why = (c_int32 * len(paths))()
        times = (c_int64 * len(paths))(*changed_ns)
        self.calls.pds_delete_files(joined(paths), len(paths), times, why)
        return list(why)

    def lease_files(self, paths: Sequence[str], used_ns: int, until_ns: int) -> tuple[int, int]:
        """Sets the access and modification times of files, one after the other, until one fails.

        Follows no link. Each modification time is 1 ns before that of the preceding file.
        Returns how many files were set, and the errno of the next file, or 0.
        """
        done = c_int64()
        why = c_int32()
        ends = (byref(done), byref(why))
        if self.calls.pds_lease_files(joined(paths), len(paths), used_ns, until_ns, *ends):
            raise ValueError("a time before 1970")
        return done.value, why.value

    def exchange_capture_mode(self, mode: int) -> int:
        """Sets the calling thread's CUDA graph capture mode and returns the previous one."""
        before = c_int32(mode)
        self.calls.pds_exchange_capture_mode(byref(before))
        return before.value


def joined(names: Sequence[str]) -> bytes:
    """Returns keys or paths as one text for the library: a zero byte follows each of them."""
    return os.fsencode("\0".join(names)) + b"\0"


def address_of(view: memoryview) -> int:
    """Returns the memory address of a writable buffer's first byte."""
    return _addressof(_first_byte(view))


_addressof = ctypes.addressof
_first_byte = c_char.from_buffer


class LibraryLoader:
    """Finds or builds the library. Loads each of its two builds once: for GPUs, for host memory.

    find, find_built: functions like `find_library` and `find_built` of pdstore.native.build.
    """

    def __init__(
        self,
        find: Callable[..., Path] = find_library,
        find_built: Callable[[], Path | None] = find_built,
    ) -> None:
        self._find = find
        self._find_built = find_built
        self._has_looked = False
        self._loaded: dict[bool, Library] = {}  # key True: the build for GPUs
        self._missing: dict[bool, str] = {}  # why there is none; finding it is not tried again
        self._warned: set[str] = set()

    def load(self, settings: Settings, *, for_gpu: bool) -> Library | None:
        """Returns the native library. If there is none, warns once with the reason, returns None.

        for_gpu: True for copies to or from GPU memory. A library for host memory is built more
          quickly; a library for GPUs can copy host memory as well.
        Returns None without a warning if PDSTORE_NATIVE is off. Raises ConfigError if
        PDSTORE_NATIVE is require and there is no library.
        """
        if settings.native == "off":
            return None
        library = self._loaded.get(True) or self._loaded.get(for_gpu)
        if library is None and for_gpu not in self._missing:
            try:
                library = self._loaded[for_gpu] = Library(self._find(with_cuda=for_gpu))
            except NativeError as error:
                self._missing[for_gpu] = str(error)
        if library is None:
            problem = self._missing[for_gpu]
        elif for_gpu and not library.num_devices:
            why = "finds no GPU (is the driver older than its CUDA?)"
            problem = f"{library.path} {why if library.has_cuda else 'was built without CUDA'}"
        else:
            return library
        if settings.native == "require":
            raise ConfigError(f"PDSTORE_NATIVE=require: {problem}")
        if problem not in self._warned:
            self._warned.add(problem)
            log.warning("block copies go through torch: %s", problem)
        return None

    def built(self, settings: Settings) -> Library | None:
        """Returns a library that can copy host memory if it is built already; else None, silently.

        Threads that must not wait for a compiler call this. A process searches for a build once.
        """
        if settings.native == "off":
            return None
        if not self._loaded and not self._has_looked:
            self._has_looked = True
            path = self._find_built()
            if path is not None:
                with contextlib.suppress(NativeError):  # `load` will warn with the reason
                    self._loaded[False] = Library(path)
        return self._loaded.get(True) or self._loaded.get(False)


_loader = LibraryLoader()
load_library = _loader.load
built_library = _loader.built
"""The methods of the process's one `LibraryLoader`: all callers share its libraries."""
