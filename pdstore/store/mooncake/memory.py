"""Memory: the buffers that a Mooncake client moves from and into, and where they are.

A slab is registered with the library once. Some transports only move registered memory (RDMA), and
a client that shares memory with another process only memory of the library's own allocator; other
buffers then pass through a slab of ours, the bounce.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pdstore.errors import StoreError
from pdstore.store.base import Slots
from pdstore.store.mooncake.client import Raw

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 10  # what is smaller is not worth a registration
BOUNCE_BYTES = 64 << 20


class Allocator(Protocol):
    """The library's MooncakeHostMemAllocator: addresses of zeroed memory, 0 when there is none."""

    def alloc(self, size: int) -> int: ...
    def free(self, address: int) -> int: ...


class _Slab(NamedTuple):
    address: int
    size: int

    def holds(self, address: int, size: int) -> bool:
        return self.address <= address and address + size <= self.address + self.size


class Memory:
    """The slabs of one client.

    allocator: the library's, when only its memory can be moved; None: any mapping will do.
    """

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._dropped: deque[_Slab] = deque()  # filled by finalizers, which may run anywhere
        self._raw: Raw | None = None
        self.bounce_lock = threading.Lock()
        self._bounce: memoryview | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        """A slab, registered now or when the client connects; freed with its last view."""
        self._free_dropped()
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_bytes < SLAB_BYTES:
            return memoryview(mmap.mmap(-1, num_bytes))
        if self._allocator is None:
            mapping = mmap.mmap(-1, num_bytes)
            view, owner = memoryview(mapping), mapping
            slab = _Slab(address_of(view), num_bytes)
            weakref.finalize(owner, self._dropped.append, slab)
        else:
            view, slab = self._take_from_library(self._allocator, num_bytes)
        with self._lock:
            self._slabs.append(slab)
            if self._raw is not None:
                _register(self._raw, slab)
        return view

    def connect(self, raw: Raw) -> None:
        """Registers the slabs with a new connection."""
        with self._lock:
            self._raw = raw
            for slab in self._slabs:
                _register(raw, slab)

    def disconnect(self) -> None:
        """The connection is going: nothing is registered with it any more."""
        with self._lock:
            self._raw = None

    def holds(self, slots: Slots, address: int) -> bool:
        """Whether all of a buffer lies in one slab."""
        size = len(slots.view)
        return any(slab.holds(address, size) for slab in list(self._slabs))

    def bounce(self, num_bytes: int) -> memoryview:
        """The slab that other buffers pass through; the caller holds `bounce_lock`."""
        if self._bounce is None or len(self._bounce) < num_bytes:
            self._bounce = None
            self._bounce = self.allocate(max(num_bytes, BOUNCE_BYTES))
        return self._bounce

    def drop_bounce(self) -> None:
        """The next bounce is a new slab."""
        with self.bounce_lock:
            self._bounce = None

    def forget_slabs(self) -> None:
        """All but the bounce cannot be moved any more: what is in them goes through it."""
        bounce = 0 if self._bounce is None else address_of(self._bounce)
        with self._lock:
            self._slabs = [slab for slab in self._slabs if slab.holds(bounce, 1)]

    def _take_from_library(self, allocator: Allocator, num_bytes: int) -> tuple[memoryview, _Slab]:
        address = allocator.alloc(num_bytes)
        if not address:
            raise StoreError(f"mooncake: no {num_bytes} bytes of shared memory")
        array = (ctypes.c_ubyte * num_bytes).from_address(address)
        slab = _Slab(address, num_bytes)
        weakref.finalize(array, self._dropped.append, slab)
        return memoryview(array).cast("B"), slab

    def _free_dropped(self) -> None:
        while self._dropped:
            slab = self._dropped.popleft()
            with self._lock:
                self._slabs = [each for each in self._slabs if each != slab]
                if self._raw is not None:
                    self._raw.unregister_buffer(slab.address)
            if self._allocator is not None:
                self._allocator.free(slab.address)


def address_of(view: memoryview) -> int:
    """Where a buffer is in this process's memory."""
    return int(torch.frombuffer(view, dtype=torch.uint8).data_ptr())


def addresses_of(slots: Slots, base: int) -> list[int]:
    """Where each slot starts, for a buffer at `base`."""
    return [base + number * slots.slot_bytes for number in slots.numbers]


def packed(sizes: Sequence[int]) -> list[int]:
    """Where values of these sizes start when they lie one behind the other, 64-byte aligned; and,
    last, where they end.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    return starts


def _register(raw: Raw, slab: _Slab) -> None:
    code = raw.register_buffer(slab.address, slab.size)
    if code:
        log.warning("mooncake: %d bytes could not be registered (%d)", slab.size, code)
