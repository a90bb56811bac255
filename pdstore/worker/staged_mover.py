"""StagedMover: moves values through staging, a window of slots at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

from pdstore.errors import LayoutError, StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
from pdstore.store.base import Slots
from pdstore.store.checked import count_of
from pdstore.threads import Deadline
from pdstore.worker.block_range import Split
from pdstore.worker.child_job import ChildJob
from pdstore.worker.mover import BAD, Ends, Loaded, Mover, Source
from pdstore.worker.staging import Staging
from pdstore.worker.swap.base import ReadyEvent
from pdstore.worker.values import Value, keys_of, whole_blocks
from pdstore.worker.verified import Verified

Arrived: TypeAlias = Callable[[Sequence[Value], Callable[[], Callable[[], None]]], None]


class StagedMover(Mover):
    """Moves values through host slots that it borrows from staging.

    A child job holds two windows at most, one that is filled and one whose copy is under way. It
    waits for slots only while it holds none, so that no two jobs wait for each other.

    split: values that are read, verified and copied together are about one range of it.
    removed: values that cannot be used for one of these reasons are removed.
    Raises LayoutError when a block's parts do not fit staging.
    """

    def __init__(
        self,
        ends: Ends,
        staging: Staging,
        split: Split,
        removed: frozenset[Reason] = BAD,
    ) -> None:
        super().__init__(ends, staging, split, removed)
        self._staging = staging
        largest = staging.largest_loan // 2
        if self._num_parts > largest:
            raise LayoutError(
                f"a block has {self._num_parts} parts on this rank and staging has"
                f" {staging.num_slots} slots: raise PDSTORE_STAGING"
            )
        window = -(-split.range_bytes // staging.slot_bytes)
        self._window = max(self._num_parts, min(window, largest))

    def _save(self, child: ChildJob, source: Source, gathered: Callable[[], None]) -> Reason | None:
        rest, ready = source
        while rest:
            with self._lend(child, len(rest), 1, child.deadline) as numbers:
                if not numbers:
                    child.check()
                    return Reason.NO_SLOTS
                window, rest = self._at_hand(rest[: len(numbers)]), rest[len(numbers) :]
                slots = self._slots(numbers, self._sizes_of(window))
                with child.copying():
                    self._gather(window, slots, ready)
                if not rest:
                    gathered()
                if not self._put(child, window, slots):
                    return Reason.STORE_ERROR
        return None

    def load(
        self,
        child: ChildJob,
        values: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None,
        loaded: Loaded,
    ) -> Reason | None:
        rest = values
        while rest:
            with contextlib.ExitStack() as held:
                numbers = self._lend_beside_a_copy(child, held, len(rest))
                if not numbers:
                    child.check()
                    return Reason.NO_SLOTS
                window = rest[: whole_blocks(rest, len(numbers))]
                rest = rest[len(window) :]
                arrived = partial(self._arrived, child, held, loaded)
                read = self._take(child, window, numbers, first_token, ready, arrived)
                if read.error is not None:
                    raise read.error
                if read.reason is not None:
                    return read.reason
        return None

    def mark(self, child: ChildJob, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        keys = list(markers)
        with self._lend(child, len(keys), len(keys), child.deadline) as numbers:
            if not numbers:
                child.check()
                return Reason.NO_SLOTS
            slots = self._slots(numbers, [block.HEADER_BYTES] * len(keys))
            for i, header in enumerate(markers.values()):
                block.seal(slots.value(i), header)
            with child.in_store_call():
                self._store.put(keys, slots)
            stored = self.num_matched(child, keys)
        return None if stored == len(keys) else Reason.LOST

    def _read_some(self, child: ChildJob, values: Sequence[Value]) -> tuple[int, Verified]:
        with contextlib.ExitStack() as held:
            numbers = self._lend_beside_a_copy(child, held, len(values))
            window = list(values[: len(numbers)])
            slots = self._slots(numbers, [value.size for value in window])
            return len(window), self._read(child, window, slots)

    def _take(
        self,
        child: ChildJob,
        window: Sequence[Value],
        numbers: Sequence[int],
        first_token: int,
        ready: ReadyEvent | None,
        arrived: Arrived,
    ) -> Verified:
        """Reads values into slots, verifies them, and starts to scatter the whole blocks of those.

        arrived: takes those values, and what starts their copies.
        """
        window = list(window)
        slots = self._slots(numbers, [value.size for value in window])
        read = self._read(child, window, slots)
        usable = self._whole(window, read)
        if usable:
            copies = self._copies_to(usable, slots.value, first_token)
            arrived(usable, partial(self._swap.start_scatter, copies, ready))
        return read

    def _arrived(
        self,
        child: ChildJob,
        held: contextlib.ExitStack,
        loaded: Loaded,
        values: Sequence[Value],
        start: Callable[[], Callable[[], None]],
    ) -> None:
        self._scatter(child, start, partial(loaded, values, None), held.pop_all())
        self._count("loaded", values)

    def _at_hand(self, window: Sequence[Value]) -> Sequence[Value]:
        """Returns values that are going to be looked at more than once."""
        return list(window)

    def _sizes_of(self, window: Sequence[Value]) -> Sequence[int]:
        return [value.size for value in window]

    def _gather(self, window: Sequence[Value], slots: Slots, ready: ReadyEvent | None) -> None:
        copies = [value.block_copy(slots.value(i)) for i, value in enumerate(window)]
        self._swap.gather(copies, ready)

    def _put(self, child: ChildJob, window: Sequence[Value], slots: Slots) -> bool:
        """Seals and stores values that were gathered; False if the store took not all of them."""
        self._seal(window, [slots.value(i) for i in range(len(window))])
        keys = keys_of(window)
        with child.in_store_call():
            accepted = count_of(self._store.put(keys, slots), keys, self._store)
            self._count("saved", window[:accepted])
        return accepted == len(window)

    def _read(self, child: ChildJob, window: Sequence[Value], slots: Slots) -> Verified:
        """Fills the slots and verifies them."""
        keys = [value.key for value in window]
        with child.in_store_call():
            try:
                found = count_of(self._store.get(keys, slots), keys, self._store)
                read = Verified(found, None if found == len(keys) else Reason.LOST)
            except StoreError as error:
                read = self._failed_read(error, keys)
        return self._verify(child, window, slots.value, read)

    def _lend_beside_a_copy(
        self, child: ChildJob, held: contextlib.ExitStack, most: int
    ) -> list[int]:
        """Lends slots for whole blocks; without a wait while a copy that holds others goes on."""
        if child.has_copy_under_way:
            at_once = self._lend(child, most, self._num_parts, Deadline(0.0))
            if numbers := held.enter_context(at_once):
                return numbers
            child.finish_copy()
        return held.enter_context(self._lend(child, most, self._num_parts, child.deadline))

    def _lend(
        self, child: ChildJob, most: int, least: int, deadline: Deadline
    ) -> AbstractContextManager[list[int]]:
        return self._staging.loan(
            child.direction,
            min(most, self._window),
            least=least,
            deadline=deadline,
            is_over=lambda: child.is_over,
        )

    def _slots(self, numbers: Sequence[int], sizes: Sequence[int]) -> Slots:
        staging = self._staging
        return Slots(staging.view, staging.slot_bytes, numbers[: len(sizes)], sizes)
