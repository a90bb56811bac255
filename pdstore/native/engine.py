"""Engine: the native swap engine of one device and one layout. Ticket: a copy that it has begun."""

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
from pdstore.native.library import Library, checked, joined

log = logging.getLogger(__name__)

_RETURN_S = 0.5


class Engine:
    """The block copies of one device and one layout. Any thread may call it.

    options: fields of `abi.Options` by name; fields left out are 0.
    parts, regions: `abi.PartShape` and `abi.Region`.
    Raises LayoutError for options that do not fit, DeviceError or SwapError from the device.
    """

    def __init__(
        self,
        library: Library,
        options: dict[str, int],
        parts: Sequence[ctypes.Structure],
        regions: Sequence[ctypes.Structure],
    ) -> None:
        self._library = library
        self._calls = library.calls
        self._lock = threading.Condition()  # no call may use the handle when it is closed
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
        """Adds a range of host memory; from then on every payload must lie in one of them."""
        with self._lock:
            self._calls.pds_add_host(self._open(), address, num_bytes)

    def explain(self, direction: int, part: int, num_tokens: int) -> tuple[str, str]:
        """Returns the copy path for a part's payloads of `num_tokens` tokens, and the reason.

        direction: 0 from the paged cache to slots, 1 from slots to the paged cache.
        Raises LayoutError.
        """
        plan = abi.Plan()
        with self._lock:
            code = self._calls.pds_explain(self._open(), direction, part, num_tokens, byref(plan))
        if code:
            raise LayoutError(f"no payload of {num_tokens} tokens of part {part}")
        why = f"{plan.why.decode()} ({plan.num_pieces} x {plan.piece_bytes} B)"
        return abi.CopyPath(plan.path).name, why

    def submit(
        self,
        direction: int,
        items: bytes,
        ids: bytes,
        *,
        stream: int = 0,
        ready: int = 0,
    ) -> Ticket:
        """Starts a copy; returns at once.

        items, ids: packed `abi.Item` and int64; copied before the call returns.
        stream: the copy begins after the work that this CUDA stream has queued; 0: at once.
        ready: the handle of a CUDA event that the copy waits for instead; it must live until the
          copy ends.
        Raises LayoutError for items that do not fit, SwapError.
        """
        handle, submit = c_void_p(), self._library.short_calls.pds_submit
        num_items, num_ids = len(items) // ctypes.sizeof(abi.Item), len(ids) // 8
        packed = items, num_items, ids, num_ids
        with self._lock:
            checked(submit, self._open(), direction, *packed, stream, ready, byref(handle))
        return Ticket(self._library, handle)

    def read_values(
        self, paths: Sequence[str], addresses: bytes, sizes: bytes, starts: bytes
    ) -> bool:
        """Reads whole files, each to its address, and verifies them; the engine's threads help.

        addresses, sizes: packed, 64 bits each; sizes are of at least 64 bytes.
        starts: the first 56 bytes of each value, side by side.
        Returns whether all files were there and right; if not, the memory may hold anything.
        Raises SwapError if the engine is closed.
        """
        with self.lent() as handle:
            code = self._calls.pds_read_values(
                handle, joined(paths), addresses, sizes, starts, len(paths)
            )
        if code not in (abi.Code.OK, abi.Code.VALUE):
            raise SwapError(f"values cannot be read: {abi.Code(code).name}")
        return bool(code == abi.Code.OK)

    def write_values(
        self, temporary: str, paths: Sequence[str], addresses: bytes, sizes: bytes, starts: bytes
    ) -> tuple[int, int]:
        """Writes values to files, and adds their headers and checksums; the engine's threads help.

        The header, with its `block.checksum`, is also written to memory. A file that exists stays
        and counts as written. A file's directory is made if missing, but not the directory above.

        temporary: the beginning of temporary files' names, which nobody else uses, on the same file
          system; no such file stays.
        addresses, sizes, starts: as `read_values` takes them.
        Returns how many leading files were written, and why the next one was not: an errno; else 0.
        Raises SwapError if the engine is closed.
        """
        done, why = c_int64(), c_int32()
        names = os.fsencode(temporary), joined(paths)
        with self.lent() as handle:
            code = self._calls.pds_write_values(
                *(handle, *names, addresses, sizes, starts, len(paths)), byref(done), byref(why)
            )
        if code != abi.Code.OK:
            raise SwapError(f"values cannot be written: {abi.Code(code).name}")
        return done.value, why.value

    @contextlib.contextmanager
    def lent(self) -> Iterator[c_void_p]:
        """Lends the handle for a long call of the library, which `close` waits for.

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
        """Fails queued copies, waits for the device and frees everything. May be called again.

        Does nothing in a forked child: the parent may have been in a call at the fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            handle, self._handle = self._handle, c_void_p()
            if not handle:
                return
            self._calls.pds_stop(handle)
            if self._lock.wait_for(lambda: self._num_lent == 0, _RETURN_S):
                self._calls.pds_close(handle)
            else:
                log.error("the swap engine is still in use %.1f s after its end", _RETURN_S)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise SwapError("the swap engine is closed")
        return self._handle


class Ticket:
    """A started copy. Dropping the ticket does not stop the copy.

    handle: the copy, for other calls of the library.
    """

    def __init__(self, library: Library, handle: c_void_p) -> None:
        self._calls = library.calls
        self._short_calls = library.short_calls
        self.handle = handle
        self._pid = os.getpid()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; False after `timeout_s`. Raises SwapError if the copy failed."""
        return checked(self._calls.pds_wait, self.handle, int(timeout_s * 1e6)) != abi.Code.PENDING

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._short_calls.pds_free_ticket(self.handle)
