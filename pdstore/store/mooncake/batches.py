"""Batches: moves values in batches that Mooncake's library can move within the time of a lease.

RDMA moves only registered memory. `Memory` allocates such memory as slabs. With RDMA, values in
other memory are copied through one slab, the bounce.

A put that finds the pool full is repeated, because the master evicts only after such a put.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pdstore.format.keys import PERMANENT, BlockKey, kind_of
from pdstore.native.library import address_of
from pdstore.store.base import Slots
from pdstore.store.mooncake.client import Client
from pdstore.store.mooncake.library import LEASE_OVER, NO_ROOM, TRANSFER_FAILED, Raw

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 10  # bytes; a smaller buffer is not registered
BOUNCE_BYTES = 64 << 20  # bytes of the buffer through which memory that is not registered goes
_FEW_KEYS = 16
_FEW_BYTES = 16 << 20  # a batch that has so many bytes and _FEW_KEYS keys is full
_MAX_KEYS = 2048
_RETRY_INTERVALS_S = (0.01, 0.03, 0.09)  # the master evicts after a put that found no room


class _Slab(NamedTuple):
    address: int
    size: int


class Memory:
    """The slabs of one connection; each is registered a single time. Any thread may call it."""

    def __init__(self) -> None:
        self.bounce_lock = threading.Lock()
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._dropped: deque[_Slab] = deque()  # filled by finalizers, on any thread
        self._raw: Raw | None = None
        self._bounce = memoryview(b"")

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns a slab, registered now or when a connection is made; its last view frees it."""
        owner = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        view = memoryview(owner)
        if num_bytes < SLAB_BYTES:
            return view
        slab = _Slab(address_of(view), len(view))
        weakref.finalize(owner, self._dropped.append, slab)
        with self._lock:
            self._forget_dropped()
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
        """Forgets the present connection, because it will be closed soon."""
        with self._lock:
            self._raw = None

    def holds(self, slots: Slots, address: int) -> bool:
        """True if one slab contains the whole buffer of `slots`, which begins at `address`."""
        end = address + len(slots.view)
        return any(start <= address and end <= start + size for start, size in list(self._slabs))

    def bounce(self, num_bytes: int) -> memoryview:
        """Returns the buffer through which other memory is copied, of `num_bytes` or more.

        The caller must hold `bounce_lock`.
        """
        if len(self._bounce) < num_bytes:
            self._bounce = self.allocate(max(num_bytes, BOUNCE_BYTES))
        return self._bounce

    def _forget_dropped(self) -> None:
        """Unregisters freed slabs, lest a new slab at the same address count as registered."""
        while self._dropped:
            slab = self._dropped.popleft()
            self._slabs = [each for each in self._slabs if each != slab]
            if self._raw is not None:
                self._raw.unregister_buffer(slab.address)


def _register(raw: Raw, slab: _Slab) -> None:
    code = raw.register_buffer(slab.address, slab.size)
    if code:
        log.warning("mooncake: %d bytes could not be registered (%d)", slab.size, code)


def is_pinned(key: BlockKey) -> bool:
    """True for a value that the master must not evict."""
    return kind_of(key) in PERMANENT


class Batches:
    """Splits a call into batches; moves each batch on the connection with the fewest running calls.

    If reading a batch takes longer than the lease, all of it is lost. So a batch is no larger than
    what can be moved in a third of the lease at the recent rate. Small batches also limit the time
    that a hung peer costs: the library's timeout for one batch, after which the caller stops.

    clients: connections, each made when it is needed; the library has one thread for each.
    memory: the slabs that the transport can move; None if the transport can move any memory.
    """

    def __init__(self, clients: Sequence[Client], memory: Memory | None, lease_s: float) -> None:
        self._clients = clients
        self._memory = memory
        self._lease_s = lease_s
        self._rate = 1e9  # bytes per second; this value is assumed until the rate is measured
        self._pressure_until = 0.0

    @property
    def most_bytes(self) -> int:
        """The present limit for the bytes of a batch; a larger value is a batch of its own."""
        by_lease = int(self._rate * self._lease_s / 3)
        return by_lease if self._memory is None else min(by_lease, BOUNCE_BYTES)

    def split(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields start and end of each batch. Pinned values have their own."""
        start = 0
        num_bytes = 0
        most = self.most_bytes
        for i, size in enumerate(sizes):
            count = i - start
            is_full = count >= _FEW_KEYS and (num_bytes >= _FEW_BYTES or count >= _MAX_KEYS)
            is_apart = is_pinned(keys[i]) != is_pinned(keys[i - 1])
            if count and (is_full or is_apart or num_bytes + size > most):
                yield start, i
                start = i
                num_bytes = 0
            num_bytes += size
        if start < len(sizes):
            yield start, len(sizes)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> list[int]:
        """Reads one batch; returns for each value its number of bytes, or an error code."""
        start = time.monotonic()
        codes = self._move(keys, slots, None)
        seconds = max(time.monotonic() - start, 1e-6)
        num_bytes = sum(code for code in codes if code > 0)
        if LEASE_OVER in codes:  # all values were moved, but too late: `_rate` was too high
            self._rate = min(self._rate, sum(slots.sizes) / seconds)
        elif num_bytes >= min(1 << 20, self.most_bytes // 2):
            self._rate += (num_bytes / seconds - self._rate) / 4
        return codes

    def put(self, keys: Sequence[BlockKey], slots: Slots, config: object) -> list[int]:
        """Writes a batch; retries values that found no room, and those that failed within 1 s.

        Returns a code for each value: 0 if its key is stored, even by an earlier put; or an error.
        """
        codes = [NO_ROOM] * len(keys)
        has_pressure = time.monotonic() < self._pressure_until
        for pause in (0.0,) if has_pressure else (0.0, *_RETRY_INTERVALS_S):
            time.sleep(pause)
            start = time.monotonic()
            self._put_those_with(NO_ROOM, codes, keys, slots, config)
            if TRANSFER_FAILED in codes and time.monotonic() - start < 1.0:
                self._put_those_with(TRANSFER_FAILED, codes, keys, slots, config)
            if NO_ROOM not in codes:
                return codes
        self._pressure_until = time.monotonic() + 1.0
        return codes

    def _put_those_with(
        self, code: int, codes: list[int], keys: Sequence[BlockKey], slots: Slots, config: object
    ) -> None:
        """Puts the values whose code in `codes` is `code`, and replaces their codes."""
        which = [i for i, each in enumerate(codes) if each == code]
        numbers = [slots.numbers[i] for i in which]
        part = replace(slots, numbers=numbers, sizes=[slots.sizes[i] for i in which])
        answers = self._move([keys[i] for i in which], part, config)
        for i, answer in zip(which, answers, strict=True):
            codes[i] = answer

    def _move(self, keys: Sequence[BlockKey], slots: Slots, config: object | None) -> list[int]:
        """Moves a batch as `Client.move` does, through the bounce if its slots need it."""
        client = min(self._clients, key=lambda client: client.rank)
        base = address_of(slots.view)
        if self._memory is None or self._memory.holds(slots, base):
            addresses = [base + number * slots.slot_bytes for number in slots.numbers]
            return client.move(keys, addresses, slots.sizes, config)
        with self._memory.bounce_lock:
            ends = list(accumulate(slots.sizes))
            bounce = self._memory.bounce(ends[-1])
            starts = [0, *ends[:-1]]
            values = [bounce[at:end] for at, end in zip(starts, ends, strict=True)]
            for i, value in enumerate(values if config is not None else ()):
                value[:] = slots.value(i)
            base = address_of(bounce)
            codes = client.move(keys, [base + at for at in starts], slots.sizes, config)
            for i, value in enumerate(values if config is None else ()):
                if codes[i] == len(value):
                    slots.value(i)[:] = value
            return codes
