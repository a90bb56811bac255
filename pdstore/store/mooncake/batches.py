"""Batches: calls of Mooncake's library that end within a lease, on memory that it can move."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.native.library import address_of
from pdstore.store.base import Slots
from pdstore.store.mooncake.barrier import Answer, Barrier
from pdstore.store.mooncake.client import Client, Raw
from pdstore.store.mooncake.codes import INVALID, LEASE_OVER
from pdstore.store.mooncake.memory import BOUNCE_BYTES, Memory, addresses_of, packed

log = logging.getLogger(__name__)

FEW_KEYS, FEW_BYTES = 16, 16 << 20  # a batch has more keys only while it has fewer bytes
_MOST_KEYS = 2048
_FIRST_RATE = 1e9  # bytes per second, until there is a measurement
_MEASURABLE_BYTES = 1 << 20


class Lane(NamedTuple):
    """A connection that moves values, and what holds back its calls that fail."""

    client: Client
    barrier: Barrier

    def call(self, function: Callable[[Raw], list[int]]) -> Answer:
        start = time.monotonic()
        with self.client.call() as raw:
            codes = function(raw)
        self.client.note(codes)
        return Answer(raw, codes, time.monotonic() - start)


class Batches:
    """Splits a call into batches and makes each one, on the lane that has least to do.

    A read that outlasts its lease is lost whole, so a batch is no larger than what a third of
    the lease moves at the rate seen lately. Small batches have a second use: a peer that hangs
    costs the library's time-out once per batch, and the caller stops after the first.

    lanes: the library copies with one thread for each; one that is not needed is not connected.
    any_memory: True if the library can copy any buffer; else it copies only slabs of `memory`.
    """

    def __init__(
        self, lanes: Sequence[Lane], memory: Memory, lease_s: float, *, any_memory: bool
    ) -> None:
        self._lanes, self._memory = lanes, memory
        self._lease_s = lease_s
        self._any_memory = any_memory
        self._rate = _FIRST_RATE

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
            is_full = count >= FEW_KEYS and (num_bytes >= FEW_BYTES or count >= _MOST_KEYS)
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
        base, lane = address_of(slots.view), self._idlest_lane()
        if self._is_movable(slots, base):
            answer = _get(lane, keys, addresses_of(slots, base), slots.sizes)
            lane.barrier.wait_after(answer)
        else:
            answer = self._get_through_bounce(lane, keys, slots)
        codes = answer.codes
        if INVALID in codes and not self._any_memory:
            codes = self._again(codes, lambda: self._get_through_bounce(lane, keys, slots))
        self._learn_rate(codes, slots.sizes, max(time.monotonic() - start, 1e-6))
        return codes

    def put(self, keys: Sequence[BlockKey], slots: Slots, config: object) -> list[int]:
        """Writes one batch; returns for each value a code, or 0, also where the key was taken."""
        base, lane = address_of(slots.view), self._idlest_lane()
        if self._is_movable(slots, base):
            answer = _put(lane, keys, addresses_of(slots, base), slots.sizes, config)
            lane.barrier.wait_after(answer)
        else:
            answer = self._put_through_bounce(lane, keys, slots, config)
        codes = answer.codes
        if INVALID in codes and not self._any_memory:
            codes = self._again(codes, lambda: self._put_through_bounce(lane, keys, slots, config))
        return codes

    def _learn_rate(self, codes: Sequence[int], sizes: Sequence[int], seconds: float) -> None:
        num_bytes = sum(code for code in codes if code > 0)
        if LEASE_OVER in codes:  # all was moved, and too late: at this rate no such batch succeeds
            self._rate = min(self._rate, sum(sizes) / seconds)
        elif num_bytes >= min(_MEASURABLE_BYTES, self.most_bytes // 2):
            self._rate += (num_bytes / seconds - self._rate) / 4

    def _again(self, codes: list[int], through_bounce: Callable[[], Answer]) -> list[int]:
        """Tries a refused batch once more, through a new bounce.

        The process that shares our memory refuses memory that it does not know. It knows none of
        ours after a restart within a second, or after it was stopped for longer than it keeps
        silent clients; the library notices neither. It learns of memory that is allocated now.
        """
        self._memory.drop_bounce()
        again = through_bounce().codes
        if again.count(INVALID) < codes.count(INVALID):
            log.warning(
                "mooncake: values are copied from now on: the process that shares our memory was"
                " stopped or replaced, and no longer knows that memory"
            )
            self._memory.forget_slabs()
        return again

    def _idlest_lane(self) -> Lane:
        return min(self._lanes, key=lambda lane: lane.client.num_running)

    def _is_movable(self, slots: Slots, base: int) -> bool:
        return self._any_memory or self._memory.holds(slots, base)

    def _put_through_bounce(
        self, lane: Lane, keys: Sequence[BlockKey], slots: Slots, config: object
    ) -> Answer:
        with self._memory.bounce_lock:
            starts = packed(slots.sizes)
            bounce = self._memory.bounce(starts[-1])
            for i in range(len(slots)):
                bounce[starts[i] : starts[i] + slots.sizes[i]] = slots.value(i)
            base = address_of(bounce)
            addresses = [base + start for start in starts[:-1]]
            answer = _put(lane, keys, addresses, slots.sizes, config)
            self._leave_bounce(lane, answer)
            return answer

    def _get_through_bounce(self, lane: Lane, keys: Sequence[BlockKey], slots: Slots) -> Answer:
        with self._memory.bounce_lock:
            starts = packed(slots.sizes)
            bounce = self._memory.bounce(starts[-1])
            base = address_of(bounce)
            addresses = [base + start for start in starts[:-1]]
            answer = _get(lane, keys, addresses, slots.sizes)
            for i, size in enumerate(slots.sizes):
                if answer.codes[i] == size:
                    slots.value(i)[:] = bounce[starts[i] : starts[i] + size]
            self._leave_bounce(lane, answer)
            return answer

    def _leave_bounce(self, lane: Lane, answer: Answer) -> None:
        """Gives up a bounce that late bytes may reach; waits only after too many were given up."""
        if lane.barrier.is_needed(answer) and not self._memory.abandon_bounce():
            lane.barrier.wait_after(answer)


def _get(
    lane: Lane, keys: Sequence[BlockKey], addresses: list[int], sizes: Sequence[int]
) -> Answer:
    return lane.call(lambda raw: raw.batch_get_into(list(keys), addresses, list(sizes)))


def _put(
    lane: Lane,
    keys: Sequence[BlockKey],
    addresses: list[int],
    sizes: Sequence[int],
    config: object,
) -> Answer:
    return lane.call(lambda raw: raw.batch_put_from(list(keys), addresses, list(sizes), config))
