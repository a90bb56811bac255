"""Memory: slabs of a connection, registered once. Lane: moves values, keeps late bytes out of them.

RDMA moves only registered memory, and shared memory must come from the library's own allocator.
Values in other buffers are then copied through a slab of ours, the bounce.

The library keeps one list of all shared memory of the process. Its ping threads walk that list
without its lock when they connect again after a fault, for as long as the other process takes to
answer; memory that is allocated or freed meanwhile crashes the process. So ours is allocated and
freed only while every connection is healthy; until then dropped slabs stay allocated.

The library gives up some calls while their transfers go on; late bytes would land in another block.

Shared memory: the library's own calls to `mooncake_client` end after 30 s, which no variable
changes. A `mooncake_client` that was stopped during a request resumes it later. It holds a lock
from the start to the end of such a request, and takes that lock exclusively to forget memory. So
once it has answered that it forgot all memory of a connection, that connection's requests are over,
or will be refused.

TCP and RDMA: the library waits 60 s for a transfer, a constant, and then reports a failure without
cancelling the transfer. A failure before that is reported only when the socket or the NIC is done
with the memory. Closing the connection ends the other transfers.
"""

# Decision: docs/decisions/029-mooncake-late-bytes.md
from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdstore.errors import StoreError, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.native.library import address_of
from pdstore.store.base import Slots
from pdstore.store.mooncake.client import Client, Server, State
from pdstore.store.mooncake.library import INVALID, Allocator, Raw, is_outage

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 10  # a smaller buffer is not worth a registration
BOUNCE_BYTES = 64 << 20
MOST_ABANDONED = 4
KEPT = "memory kept until nobody uses it"
"""The name under which `codes()` counts the calls that were held back."""

_PAUSE_S = 0.02


class _Slab(NamedTuple):
    address: int
    size: int


class Memory:
    """The slabs of one client.

    allocator: the library's, if only its memory can be moved; None if any mapping will do.
    wait_s: how long an allocation waits for the end of a reconnection.
    """

    def __init__(self, allocator: Allocator | None, *, wait_s: float = 1.0) -> None:
        self.bounce_lock = threading.Lock()
        self._allocator = allocator
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._registered: set[_Slab] = set()
        self._dropped: deque[_Slab] = deque()  # filled by finalizers, which may run anywhere
        self._raw: Raw | None = None
        self._is_over = False
        self._bounce: memoryview | None = None
        self._abandoned: list[memoryview] = []
        if allocator is not None:
            _sharing.add(self)

    @property
    def is_healthy(self) -> bool:
        """True unless the library is reconnecting, or may be."""
        if not self._lock.acquire(timeout=_PAUSE_S):  # a registration holds it, and waits
            return False
        try:
            return self._raw is None or self._raw.health_check() == 0
        finally:
            self._lock.release()

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns a slab, registered now or when the client connects; its last view frees it.

        Raises StoreUnavailable when shared memory cannot be allocated now, and StoreError when
        there is too little of it.
        """
        self._free_dropped()
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_bytes < SLAB_BYTES:
            return memoryview(mmap.mmap(-1, num_bytes))
        if self._allocator is None:
            owner: mmap.mmap | ctypes.Array[ctypes.c_ubyte] = mmap.mmap(-1, num_bytes)
        else:
            address = self._allocate_shared(self._allocator, num_bytes)
            owner = (ctypes.c_ubyte * num_bytes).from_address(address)
        view = memoryview(owner).cast("B")
        slab = _Slab(address_of(view), num_bytes)
        weakref.finalize(owner, self._dropped.append, slab)
        with self._lock:
            self._slabs.append(slab)
            if self._raw is not None:
                self._register(self._raw, slab)
        return view

    def connect(self, raw: Raw) -> None:
        """Registers the slabs with a new connection, unless the store was closed meanwhile."""
        with self._lock:
            if not self._is_over:
                self._raw = raw
                self._registered.clear()
                for slab in self._slabs:
                    self._register(raw, slab)

    def disconnect(self) -> None:
        """Stops registering for good: the store is being closed."""
        with self._lock:
            self._raw = None
            self._is_over = True

    def detach(self, raw: Raw) -> bool:
        """Unregisters every slab. Returns True if the other side knows none of them any more.

        May be called again after a failure. The next connection registers them all.
        """
        with self._lock:
            is_unknown = all([self._unregister(raw, slab) for slab in list(self._registered)])
            self._raw = None if is_unknown else self._raw
            return is_unknown

    def holds(self, slots: Slots, address: int) -> bool:
        """True if one slab holds the buffer at this address whose slots these are."""
        end = address + len(slots.view)
        return any(
            slab.address <= address and end <= slab.address + slab.size
            for slab in list(self._slabs)
        )

    def bounce(self, num_bytes: int, *, is_new: bool = False) -> memoryview:
        """Returns the bounce, of at least this size; the caller holds `bounce_lock`."""
        if is_new or self._bounce is None or len(self._bounce) < num_bytes:
            self._bounce = None
            self._bounce = self.allocate(max(num_bytes, BOUNCE_BYTES))
        return self._bounce

    def abandon_bounce(self) -> bool:
        """Gives up the bounce, which late bytes may still reach; the next one is a new slab.

        Returns False if too many were given up before. They stay allocated, so that their
        addresses are not used again. The caller holds `bounce_lock`.
        """
        if self._bounce is None or len(self._abandoned) == MOST_ABANDONED:
            return False
        self._abandoned.append(self._bounce)
        self._bounce = None
        return True

    def forget_slabs(self) -> None:
        """Forgets all slabs but the bounce: their values go through it from now on."""
        bounce = 0 if self._bounce is None else address_of(self._bounce)
        with self._lock:
            self._slabs = [slab for slab in self._slabs if slab.address == bounce]

    def _register(self, raw: Raw, slab: _Slab) -> None:
        code = raw.register_buffer(slab.address, slab.size)
        if code:
            log.warning("mooncake: %d bytes could not be registered (%d)", slab.size, code)
        else:
            self._registered.add(slab)

    def _unregister(self, raw: Raw, slab: _Slab) -> bool:
        """Unregisters a slab. Returns True if the other side does not know it any more."""
        if slab in self._registered and raw.unregister_buffer(slab.address) in (0, INVALID):
            self._registered.discard(slab)
        return slab not in self._registered

    def _allocate_shared(self, allocator: Allocator, num_bytes: int) -> int:
        deadline = time.monotonic() + self._wait_s
        while not _is_library_healthy():
            if time.monotonic() > deadline:
                raise StoreUnavailable("mooncake: no shared memory until the library reconnects")
            time.sleep(_PAUSE_S)
        address: int = allocator.alloc(num_bytes)
        if not address:
            raise StoreError(f"mooncake: cannot get {num_bytes} bytes of shared memory")
        return address

    def _free_dropped(self) -> None:
        for _ in range(len(self._dropped)):
            slab = self._dropped.popleft()
            with self._lock:  # the next slab at its address would be taken for it
                is_unknown = self._raw is None or self._unregister(self._raw, slab)
                if is_unknown:
                    self._slabs = [each for each in self._slabs if each != slab]
            if not is_unknown or (self._allocator is not None and not _is_library_healthy()):
                self._dropped.append(slab)
            elif self._allocator is not None:
                self._allocator.free(slab.address)


_sharing: weakref.WeakSet[Memory] = weakref.WeakSet()
os.register_at_fork(after_in_child=_sharing.clear)  # no child may call its parent's connections


def _is_library_healthy() -> bool:
    return all(memory.is_healthy for memory in list(_sharing))


class Lane:
    """A connection that moves values, and waits for transfers that its failed calls left under way.

    label: of the store, for messages.
    sharer: the process that shares our memory; None when this process moves the bytes itself.
    pause_s: between two attempts to end what is under way.
    """

    def __init__(
        self,
        label: str,
        client: Client,
        memory: Memory,
        sharer: Server | None,
        *,
        pause_s: float = 0.2,
    ) -> None:
        self.client = client
        self._label = label
        self._memory = memory
        self._sharer = sharer
        self._pause_s = pause_s
        self._trying = threading.Lock()
        self._num_answers = 0  # in a row: a process that is being killed may still give one

    def move(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        config: object | None,
        addresses: list[int],
        can_leave: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Moves values between the pool and memory, and waits; returns the codes.

        config: of a put; None for a get.
        """
        sizes, begin = list(slots.sizes), time.monotonic()
        with self.client.call() as raw:
            codes: list[int]
            if config is None:
                codes = raw.batch_get_into(list(keys), addresses, sizes)
            else:
                codes = raw.batch_put_from(list(keys), addresses, sizes, config)
        self.client.count_codes(codes)
        self.wait_after(raw, codes, time.monotonic() - begin, can_leave)
        return codes

    def wait_after(
        self, raw: Raw, codes: Sequence[int], seconds: float, can_leave: Callable[[], bool]
    ) -> None:
        """Returns when nothing can use the call's memory any more: at once after most calls.

        Otherwise blocks for as long as that takes, even if the store is closed meanwhile, and
        other calls are refused. The job's deadline ends the job, but its slots stay lent until
        this returns.

        seconds: that the call took.
        can_leave: is asked if its transfers may go on; true gives the memory up in place of a wait.
        """
        if self._sharer is not None:
            is_over = not any(is_outage(code) for code in codes)
        else:
            # a little less than the library's 60 s: its clock is another one
            is_over = seconds <= 55.0 or all(code >= 0 for code in codes)
        if is_over or can_leave():
            return
        log.warning(
            "%s: a call was given up after %.0f s and may still be under way;"
            " its memory is kept until that is over",
            self._label,
            seconds,
        )
        self.client.codes[KEPT] += 1
        self.client.suspend(raw)
        start = time.monotonic()
        while self.client.is_suspended(raw):
            with self._trying:
                if self.client.is_suspended(raw):
                    self._try_to_end(raw)
            if self.client.is_suspended(raw):
                time.sleep(self._pause_s)
        waited = time.monotonic() - start
        log.warning("%s: that call is over; its memory was kept for %.1f s", self._label, waited)

    def _try_to_end(self, raw: Raw) -> None:
        """Ends the suspension if nothing can be under way any more.

        The library maps all memory again while its own ping fails. So the other process has
        certainly forgotten our memory only if the connection is healthy before and after.
        """
        if self._sharer is None:
            if not self.client.num_running:
                self._memory.detach(raw)
                self.client.replace(raw)
            return
        state = self._sharer.ask()
        self._num_answers = self._num_answers + 1 if state is State.ANSWERS else 0
        if state is State.GONE:
            self.client.restore(raw)  # the library finds the successor by itself
        elif (
            self._num_answers > 1
            and not self.client.num_running
            and raw.health_check() == 0
            and self._memory.detach(raw)
            and raw.health_check() == 0
        ):
            self._num_answers = 0
            self.client.replace(raw)  # late requests of the old connection find no memory mapped
