"""Mover: carries values between the paged cache and the store, a window of slots at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from pdstore import block
from pdstore.errors import LayoutError, WrongLength
from pdstore.handoff import Attempt
from pdstore.job import Job
from pdstore.keys import Namespace
from pdstore.layout import Layout
from pdstore.metrics import Metrics
from pdstore.staging import Staging
from pdstore.store.base import Store
from pdstore.swap import Swap
from pdstore.types import Reason, Slots
from pdstore.values import Value

log = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20


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
        largest = staging.largest_loan // 2
        if len(self._parts) > largest:
            raise LayoutError(
                f"a block has {len(self._parts)} parts on this rank and staging has"
                f" {staging.num_slots} slots: raise PDSTORE_STAGING"
            )
        self._window = max(len(self._parts), min(_WINDOW_BYTES // staging.slot_bytes, largest))

    def num_stored(self, values: Sequence[Value]) -> int:
        """How many of the first values are in the store; renews their leases."""
        return self._store.match([value.key for value in values])

    def save(self, job: Job, values: Sequence[Value]) -> Reason | None:
        """Stores values: gather, seal, put. Why not all of them, or None."""
        rest = values
        while rest:
            with self._lend(job, len(rest), 1) as numbers:
                if not numbers:
                    job.check()
                    return Reason.NO_SLOTS
                window, rest = rest[: len(numbers)], rest[len(numbers) :]
                slots = self._slots(numbers, [value.size for value in window])
                with job.touching():
                    self._swap.gather([v.piece(slots.piece(i)) for i, v in enumerate(window)])
                if not rest:
                    job.set_captured()
                for i, value in enumerate(window):
                    block.seal(slots.piece(i), value.header)
                accepted = self._store.put([value.key for value in window], slots)
                self._count("saved", window[:accepted])
                job.check()
                if accepted < len(window):
                    return Reason.STORE_ERROR
        return None

    def load(self, job: Job, values: Sequence[Value], first_token: int) -> Reason | None:
        """Loads values: get, verify, scatter; moves `job.progress`. Why not all, or None."""
        rest, parts = values, len(self._parts)
        while rest:
            with self._lend(job, len(rest), parts) as numbers:
                if not numbers:
                    job.check()
                    return Reason.NO_SLOTS
                window = rest[: len(numbers) // parts * parts]
                rest = rest[len(window) :]
                slots = self._slots(numbers, [value.size for value in window])
                verified, reason = self._get_verified(window, slots)
                usable = window[: verified // parts * parts]
                self._scatter(job, usable, slots, first_token)
                if reason is not None:
                    return reason
        return None

    def mark(self, job: Job, namespace: Namespace, handoff: Attempt, state: str) -> None:
        """Puts this rank's markers of a hand-off: one for each of its shards."""
        shards = sorted({part.shard for part in self._parts})
        for shard in shards:
            with self._lend(job, 1, 1) as numbers:
                job.check()
                slots = self._slots(numbers, [block.HEADER_BYTES])
                header = block.Header(
                    flags=block.FLAG_MARKER,
                    group=0,
                    shard=shard,
                    num_shards=len(shards),
                    num_tokens=job.progress,
                    payload_bytes=0,
                    namespace=namespace.digest,
                    prefix_hash=bytes.fromhex(handoff.hex),
                )
                block.seal(slots.piece(0), header)
                self._store.put([handoff.marker(namespace, shard, state)], slots)

    def _get_verified(self, window: Sequence[Value], slots: Slots) -> tuple[int, Reason | None]:
        """Fills the slots and verifies them: how many of the first are right, and why not all."""
        keys = [value.key for value in window]
        reason: Reason | None = None
        try:
            found = self._store.get(keys, slots)
            reason = None if found == len(keys) else Reason.LOST
        except WrongLength as error:
            found, reason = error.num_done, Reason.CORRUPT
        for i in range(found):
            wrong = block.verify(slots.piece(i), window[i].header)
            if wrong is not None:
                found, reason = i, wrong
                break
        if reason in (Reason.CORRUPT, Reason.FOREIGN):
            log.warning("%s: %s is %s; removed", self._store.label, keys[found], reason.value)
            self._store.remove([keys[found]])
        return found, reason

    def _scatter(self, job: Job, usable: Sequence[Value], slots: Slots, first_token: int) -> None:
        pieces = [
            value.piece(slots.piece(i), max(0, first_token - value.number * self._block_tokens))
            for i, value in enumerate(usable)
        ]
        with job.touching():
            self._swap.scatter(pieces)
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
        """Counts the tokens of each block once, with its first part."""
        tokens = sum(v.header.num_tokens for v in values if v.part == self._parts[0])
        self._metrics.tokens.labels(verb).inc(tokens)
