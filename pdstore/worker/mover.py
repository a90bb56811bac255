"""Mover: carries values between the paged cache and the store, a window of slots at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from pdstore.errors import LayoutError, StoreError, WrongLength
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.store.base import Slots, Store
from pdstore.store.find import find_optional
from pdstore.store.optional import ChecksumReader
from pdstore.worker.job import Job
from pdstore.worker.staging import Staging
from pdstore.worker.swap.base import ReadyEvent, Swap
from pdstore.worker.values import Value, whole_blocks

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20
"""Values that are got, verified and copied together: as many as begin within so many bytes."""


class _Got(NamedTuple):
    """What a get brought: the values that are right, and why there are not more."""

    num_verified: int
    reason: Reason | None
    error: StoreError | None


def _nothing() -> None:
    pass


class Mover:
    """The work of one job, on the worker thread that runs it; it holds one window of slots at most.

    Values come and go whole blocks first to last; nothing is written to the paged cache that was
    not verified.
    """

    def __init__(
        self, layout: Layout, swap: Swap, staging: Staging, store: Store, metrics: Metrics
    ) -> None:
        self._parts = layout.owned_parts
        self._block_tokens = layout.block_tokens
        self._swap, self._staging, self._store, self._metrics = swap, staging, store, metrics
        self._reader = find_optional(store, ChecksumReader)
        largest = staging.largest_loan // 2
        if len(self._parts) > largest:
            raise LayoutError(
                f"a block has {len(self._parts)} parts on this rank and staging has"
                f" {staging.num_slots} slots: raise PDSTORE_STAGING"
            )
        window = -(-WINDOW_BYTES // staging.slot_bytes)
        self._window = max(len(self._parts), min(window, largest))

    def num_stored(self, job: Job, values: Sequence[Value]) -> int:
        """How many of the first values are in the store; renews their leases."""
        with job.in_store_call():
            return self._store.match([value.key for value in values])

    def save(
        self,
        job: Job,
        values: Sequence[Value],
        ready: ReadyEvent | None = None,
        gathered: Callable[[], None] = _nothing,
    ) -> Reason | None:
        """Stores values: gather, seal, put. Why not all of them, or None.

        ready: what the copies follow.
        gathered: called when the last of them is copied out of the paged cache.
        """
        rest = values
        while rest:
            with self._lend(job, len(rest), 1) as numbers:
                if not numbers:
                    job.check()
                    return Reason.NO_SLOTS
                window, rest = rest[: len(numbers)], rest[len(numbers) :]
                slots = self._slots(numbers, [value.size for value in window])
                with job.copying():
                    copies = [v.block_copy(slots.value(i)) for i, v in enumerate(window)]
                    self._swap.gather(copies, ready)
                if not rest:
                    gathered()
                for i, value in enumerate(window):
                    block.seal(slots.value(i), value.header)
                with job.in_store_call():
                    accepted = self._store.put([value.key for value in window], slots)
                    self._count("saved", window[:accepted])
                if accepted < len(window):
                    return Reason.STORE_ERROR
        return None

    def load(
        self,
        job: Job,
        values: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None = None,
    ) -> Reason | None:
        """Loads values: get, verify, scatter; moves `job.progress`. Why not all, or None.

        ready: what the copies follow; the store is asked before.
        """
        rest, parts = values, len(self._parts)
        while rest:
            with self._lend(job, len(rest), parts) as numbers:
                if not numbers:
                    job.check()
                    return Reason.NO_SLOTS
                window = rest[: whole_blocks(rest, len(numbers))]
                rest = rest[len(window) :]
                slots = self._slots(numbers, [value.size for value in window])
                got = self._get_verified(job, window, slots)
                usable = window[: whole_blocks(window, got.num_verified)]
                self._scatter(job, usable, slots, first_token, ready)
                if got.error is not None:
                    raise got.error
                if got.reason is not None:
                    return got.reason
        return None

    def mark(self, job: Job, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        """Puts markers, values of a header alone; why D cannot see all of them, or None."""
        keys = list(markers)
        with self._lend(job, len(keys), len(keys)) as numbers:
            if not numbers:
                job.check()
                return Reason.NO_SLOTS
            slots = self._slots(numbers, [block.HEADER_BYTES] * len(keys))
            for i, header in enumerate(markers.values()):
                block.seal(slots.value(i), header)
            with job.in_store_call():
                self._store.put(keys, slots)
                stored = self._store.match(keys)
        return None if stored == len(keys) else Reason.LOST

    def _get_verified(self, job: Job, window: Sequence[Value], slots: Slots) -> _Got:
        """Fills the slots and verifies them."""
        keys = [value.key for value in window]
        reason: Reason | None = None
        failure: StoreError | None = None
        sums: list[int] | None = None
        with job.in_store_call():
            try:
                if self._reader is None:
                    found = self._store.get(keys, slots)
                else:
                    sums = [0] * len(keys)
                    found = self._reader.get_with_checksums(keys, slots, sums)
                reason = None if found == len(keys) else Reason.LOST
            except WrongLength as error:
                found, reason = error.num_done, Reason.CORRUPT
            except StoreError as error:  # what came before it is good
                found, failure = error.num_done, error
        for i in range(found):
            wrong = block.verify(slots.value(i), window[i].header, sums[i] if sums else None)
            if wrong is not None:
                found, reason = i, wrong
                break
        if reason in (Reason.CORRUPT, Reason.FOREIGN):
            self._remove(job, keys[found], reason)
        return _Got(found, reason, failure)

    def _remove(self, job: Job, key: BlockKey, reason: Reason) -> None:
        """Forgets a value that must not be used, so that the next save heals it."""
        log.warning("%s: %s is %s and is removed", self._store.label, key, reason.value)
        with job.in_store_call():
            try:
                self._store.remove([key])
            except StoreError as error:
                log.warning("it could not be removed: %s", error)

    def _scatter(
        self,
        job: Job,
        usable: Sequence[Value],
        slots: Slots,
        first_token: int,
        ready: ReadyEvent | None,
    ) -> None:
        copies = [
            value.block_copy(
                slots.value(i), max(0, first_token - value.number * self._block_tokens)
            )
            for i, value in enumerate(usable)
        ]
        with job.copying():
            self._swap.scatter(copies, ready)
            if usable:
                last = usable[-1]
                job.progress = last.number * self._block_tokens + last.header.num_tokens
        self._count("loaded", usable)

    def _lend(self, job: Job, most: int, least: int) -> AbstractContextManager[list[int]]:
        return self._staging.loan(
            job.direction,
            min(most, self._window),
            least=least,
            deadline=job.deadline,
            is_over=lambda: job.done,
        )

    def _slots(self, numbers: Sequence[int], sizes: Sequence[int]) -> Slots:
        staging = self._staging
        return Slots(staging.view, staging.slot_bytes, numbers[: len(sizes)], sizes)

    def _count(self, verb: str, values: Sequence[Value]) -> None:
        """Counts the tokens of each block once."""
        tokens = sum(v.header.num_tokens for v in values if v.leads)
        self._metrics.tokens.labels(verb).inc(tokens)
