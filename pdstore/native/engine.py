"""Engine: block copies of one device and layout, and files of values. Ticket: a copy under way."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int32, c_int64, c_void_p

from pdstore.errors import LayoutError, SwapError
from pdstore.native import library as abi
from pdstore.native.library import FileWay, Library, checked, joined

log = logging.getLogger(__name__)


class Engine:
    """Makes the block copies of one device and one layout. Any thread may call it.

    options: values for the fields of `abi.Options`, by name; a field that is left out is 0.
    parts, regions: structs `abi.PartShape` and `abi.Region`.
    Raises LayoutError for options that do not fit the parts and regions, DeviceError if the device
    cannot be used, SwapError if a call of the device fails.
    """

    # Not globals: when an interpreter ends, an engine may be freed after the globals of its module.
    _getpid = staticmethod(os.getpid)
    _RETURN_S = 0.5

    def __init__(
        self,
        library: Library,
        options: dict[str, int],
        parts: Sequence[ctypes.Structure],
        regions: Sequence[ctypes.Structure],
    ) -> None:
        self._library = library
        self._calls = library.calls
        self._lock = threading.Condition()  # a call holds it, or counts as lent, until it ends
        self._num_lent = 0
        self._pid = os.getpid()
        self._handle = c_void_p()
        counts = {"abi": abi.ABI, "num_parts": len(parts), "num_regions": len(regions)}
        checked(
            self._calls.pds_open,
            byref(abi.Options(**counts, **options)),
            (abi.PartShape * len(parts))(*parts),
            (abi.Region * len(regions))(*regions),
            byref(self._handle),
        )

    def add_host(self, address: int, num_bytes: int) -> None:
        """Adds a range of host memory. Every payload must lie in one of the ranges added so far."""
        with self._lock:
            self._calls.pds_add_host(self._open(), address, num_bytes)

    def explain(self, direction: int, part: int, num_tokens: int) -> tuple[str, str]:
        """Returns how payloads of `num_tokens` tokens of a part are copied (`CopyPath`), and why.

        direction: 0 from the paged cache to slots, 1 from slots to the paged cache.
        Raises LayoutError if there are no such payloads.
        """
        plan = abi.Plan()
        with self._lock:
            code = self._calls.pds_explain(self._open(), direction, part, num_tokens, byref(plan))
        if code:
            raise LayoutError(f"no payload of {num_tokens} tokens of part {part}")
        why = f"{plan.why.decode()} ({plan.num_pieces} x {plan.piece_bytes} B)"
        return abi.CopyPath(plan.path).name, why

    def submit(
        self, direction: int, items: bytes, ids: bytes, *, stream: int = 0, ready: int = 0
    ) -> Ticket:
        """Starts a copy; returns without waiting for it.

        direction: 0 from the paged cache to slots, 1 from slots to the paged cache.
        items, ids: structs `abi.Item` and int64 block ids, packed. The caller may free both when
          this call returns.
        stream: a CUDA stream; the copy begins after the work that is queued on it now. 0: at once.
        ready: the handle of a CUDA event after which the copy begins, whatever `stream` is; it must
          live until the copy ends. 0: no event.
        Raises LayoutError for items that do not fit the layout, SwapError if the copy cannot start.
        """
        handle = c_void_p()
        submit = self._library.calls_holding_gil.pds_submit
        num_items = len(items) // ctypes.sizeof(abi.Item)
        num_ids = len(ids) // 8
        packed = items, num_items, ids, num_ids
        with self._lock:
            checked(submit, self._open(), direction, *packed, stream, ready, byref(handle))
        return Ticket(self._library, handle)

    def read_values(
        self,
        paths: Sequence[str],
        addresses: bytes,
        sizes: bytes,
        starts: bytes,
        way: FileWay = FileWay.CACHED,
    ) -> bool:
        """Reads each file to its address and verifies it, on threads of the engine.

        addresses, sizes: packed, 64 bits for each number; each size is at least 64 bytes.
        starts: the first 56 bytes of each value, one after the other.
        Returns whether all files were there and right. If not, the memory may hold any bytes.
        Raises SwapError if the engine is closed.
        """
        with self.lent() as handle:
            code = self._calls.pds_read_values(
                handle, way, joined(paths), addresses, sizes, starts, len(paths)
            )
        if code not in (abi.Code.OK, abi.Code.VALUE):
            raise SwapError(f"values cannot be read: {abi.Code(code).name}")
        return bool(code == abi.Code.OK)

    def write_values(
        self,
        temporary: str,
        paths: Sequence[str],
        addresses: bytes,
        sizes: bytes,
        starts: bytes,
        way: FileWay = FileWay.CACHED,
    ) -> tuple[int, int]:
        """Adds headers and checksums to values in memory, then writes these values to files.

        Threads of the engine do this. A file that exists already stays as it is and counts as
        written. A missing directory of a file is made, if the directory above it exists.

        temporary: the path with which the names of unfinished files begin, on the file system of
          `paths`; nobody else may use such names. No unfinished file is left behind.
        addresses, sizes, starts: as `read_values` takes them.
        Returns how many leading files were written, and the errno that kept the next file from
        being written, or 0. Raises SwapError if the engine is closed.
        """
        done = c_int64()
        why = c_int32()
        names = os.fsencode(temporary), joined(paths)
        with self.lent() as handle:
            code = self._calls.pds_write_values(
                *(handle, way, *names, addresses, sizes, starts, len(paths)),
                byref(done),
                byref(why),
            )
        if code != abi.Code.OK:
            raise SwapError(f"values cannot be written: {abi.Code(code).name}")
        return done.value, why.value

    @contextlib.contextmanager
    def lent(self) -> Iterator[c_void_p]:
        """Lends the engine's handle for a long call of the library; `close` waits for that call.

        Raises SwapError if the engine is closed.
        """
        with self._lock:
            handle = self._open()
            self._num_lent += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._num_lent -= 1
                self._lock.notify_all()

    def close(self) -> None:
        """Fails queued copies, waits for running ones and frees the engine. May be called again.

        Does nothing in a forked child, because the parent may have been in a call at the fork.
        """
        if self._getpid() != self._pid:
            return
        with self._lock:
            handle, self._handle = self._handle, type(self._handle)()
            if not handle:
                return
            self._calls.pds_stop(handle)
            if self._lock.wait_for(lambda: self._num_lent == 0, self._RETURN_S):
                self._calls.pds_close(handle)
            else:
                log.error("the swap engine is still in use %.1f s after its end", self._RETURN_S)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise SwapError("the swap engine is closed")
        return self._handle


class Ticket:
    """A copy that has been started. It goes on even if nobody keeps the ticket.

    handle: the library's pointer to the copy, an argument of its functions.
    """

    _getpid = staticmethod(os.getpid)  # no global, as in an engine

    def __init__(self, library: Library, handle: c_void_p) -> None:
        self._calls = library.calls
        self._calls_holding_gil = library.calls_holding_gil
        self.handle = handle
        self._pid = os.getpid()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the copy; returns whether it ended in time. Raises SwapError if it failed."""
        return checked(self._calls.pds_wait, self.handle, int(timeout_s * 1e6)) != abi.Code.PENDING

    def __del__(self) -> None:
        if self._getpid() == self._pid:
            self._calls_holding_gil.pds_free_ticket(self.handle)
