"""Batches: values are moved by calls of Mooncake's library that end within a lease.

A put of a full pool is tried again here, since the master evicts after a put that found no room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.native.library import address_of
from pdstore.store.base import Slots
from pdstore.store.mooncake.barrier import BOUNCE_BYTES, Lane, Memory
from pdstore.store.mooncake.library import INVALID, LEASE_OVER, NO_ROOM, TRANSFER_FAILED

log = logging.getLogger(__name__)

_FEW_KEYS = 16
_FEW_BYTES = 16 << 20  # a batch has more keys only while it has fewer bytes
_MOST_KEYS = 2048
_PAUSES_S = (0.01, 0.03, 0.09)  # the master evicts after a put that found no room


class Batches:
    """Splits a call into batches and makes each one, on the lane that has least to do.

    A read that outlasts its lease is lost whole. So a batch is no larger than what can be moved
    in a third of the lease at the rate of late. Small batches have a second use: a peer that hangs
    costs the library's time-out once per batch, and the caller stops after the first.

    lanes: the library copies with one thread for each; one that is not needed is not connected.
    any_memory: True if the library can copy any buffer; else it copies only slabs of `memory`.
    """

    def __init__(
        self, lanes: Sequence[Lane], memory: Memory, lease_s: float, *, any_memory: bool
    ) -> None:
        self._lanes = lanes
        self._memory = memory
        self._lease_s = lease_s
        self._any_memory = any_memory
        self._rate = 1e9  # bytes per second, until there is a measurement
        self._pressure_until = 0.0

    @property
    def most_bytes(self) -> int:
        """Size of the largest batch now; a single larger value is a batch of its own."""
        by_lease = int(self._rate * self._lease_s / 3)
        return by_lease if self._any_memory else min(by_lease, BOUNCE_BYTES)

    def split(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the start and end of each batch. The pool's key is alone in one: it is pinned."""
        start, num_bytes, most = 0, 0, self.most_bytes
        for i, size in enumerate(sizes):
            count = i - start
            is_full = count >= _FEW_KEYS and (num_bytes >= _FEW_BYTES or count >= _MOST_KEYS)
            is_apart = POOL_ID_KEY in (keys[i], keys[i - 1])
            if count and (is_full or is_apart or num_bytes + size > most):
                yield start, i
                start, num_bytes = i, 0
            num_bytes += size
        if start < len(sizes):
            yield start, len(sizes)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> list[int]:
        """Reads one batch; returns for each value its number of bytes, or a code."""
        start = time.monotonic()
        codes = self._move(keys, slots, None)
        seconds = max(time.monotonic() - start, 1e-6)
        num_bytes = sum(code for code in codes if code > 0)
        if LEASE_OVER in codes:  # all was moved, and too late: at this rate no batch succeeds
            self._rate = min(self._rate, sum(slots.sizes) / seconds)
        elif num_bytes >= min(1 << 20, self.most_bytes // 2):
            self._rate += (num_bytes / seconds - self._rate) / 4
        return codes

    def put(self, keys: Sequence[BlockKey], slots: Slots, config: object) -> list[int]:
        """Writes a batch, again what found no room, and once more what failed at once.

        Returns for each value a code, or 0, also where the key was taken.
        """
        codes = [NO_ROOM] * len(keys)
        has_pressure = time.monotonic() < self._pressure_until
        for pause in (0.0,) if has_pressure else (0.0, *_PAUSES_S):
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
        """Puts the values that have a code, and replaces their codes."""
        which = [i for i, each in enumerate(codes) if each == code]
        numbers = [slots.numbers[i] for i in which]
        part = replace(slots, numbers=numbers, sizes=[slots.sizes[i] for i in which])
        answers = self._move([keys[i] for i in which], part, config)
        for i, answer in zip(which, answers, strict=True):
            codes[i] = answer

    def _move(self, keys: Sequence[BlockKey], slots: Slots, config: object | None) -> list[int]:
        """Moves a batch from or to where its slots are, or through the bounce.

        The process that shares our memory refuses memory that it does not know. It knows none of
        ours after a restart within a second, or after it was stopped for longer than it keeps
        silent clients; the library notices neither. It learns of memory that is allocated now, so
        a refused batch is moved once more, through a new bounce.
        """
        lane = min(self._lanes, key=lambda lane: lane.client.num_running)
        base = address_of(slots.view)
        if self._any_memory or self._memory.holds(slots, base):
            addresses = [base + number * slots.slot_bytes for number in slots.numbers]
            codes = lane.move(keys, slots, config, addresses)
        else:
            codes = self._copy(lane, keys, slots, config)
        refused = codes.count(INVALID)
        if self._any_memory or not refused:
            return codes
        codes = self._copy(lane, keys, slots, config, by_new_bounce=True)
        if codes.count(INVALID) < refused:
            log.warning(
                "mooncake: values are copied from now on: the process that shares our memory was"
                " stopped or replaced, and no longer knows that memory"
            )
            self._memory.forget_slabs()
        return codes

    def _copy(
        self,
        lane: Lane,
        keys: Sequence[BlockKey],
        slots: Slots,
        config: object | None,
        *,
        by_new_bounce: bool = False,
    ) -> list[int]:
        """Moves a batch through the bounce.

        Gives up a bounce that late bytes may reach; waits only after too many were given up.
        """
        ends = list(accumulate(-(-size // 64) * 64 for size in slots.sizes))
        with self._memory.bounce_lock:
            bounce = self._memory.bounce(ends[-1], is_new=by_new_bounce)
            starts = [0, *ends[:-1]]
            values = [bounce[at : at + size] for at, size in zip(starts, slots.sizes, strict=True)]
            for i, value in enumerate(values if config is not None else ()):
                value[:] = slots.value(i)
            addresses = [address_of(bounce) + start for start in starts]
            leave = self._memory.abandon_bounce
            codes = lane.move(keys, slots, config, addresses, leave)
            for i, value in enumerate(values if config is None else ()):
                if codes[i] == len(value):
                    slots.value(i)[:] = value
            return codes
