"""ChunkMover: loads and saves the chunks of one share, through a buffer of its own.

ChunkFinder says which are stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pdstore.errors import BadValue, ConfigError, Reason, reason_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store, count_of, num_done_of, stored_among
from pdstore.store.optional import FindsKeys, OpensTiers
from pdstore.worker.transfer.staging import slot_bytes_for
from pdstore_lmcache.chunk_names import ChunkName
from pdstore_lmcache.chunk_task import ChunkTask


class Chunk(NamedTuple):
    """A chunk to move.

    number: in its task.
    memory: LMCache's own, for the payload.
    """

    number: int
    name: ChunkName
    memory: memoryview

    @property
    def header_and_payload_bytes(self) -> int:
        return block.HEADER_BYTES + len(self.memory)


class ChunkFinder:
    """Finds stored keys behind gaps too. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._which = store.optional(FindsKeys)

    def find(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns the keys that are stored, and leases those. Raises StoreError.

        One call of the store if all are there, and two or three otherwise; a store that cannot
        look for unrelated keys is called once for each gap.
        """
        found: set[BlockKey] = set()
        rest = keys
        while rest:
            count = count_of(self._store.match(rest), rest, self._store)
            found.update(rest[:count])
            rest = rest[count + 1 :]
            if rest and self._which is not None:
                stored = stored_among(self._which.which_stored(rest), rest, self._store)
                rest = [key for key in rest if key in stored]
        return found


class ChunkMover:
    """Moves chunks between a store and LMCache's memory. One thread at a time may use one.

    A chunk that is missing or wrong is skipped, and those behind it are moved all the same; a
    wrong one is removed from the store. If the store has tiers, it is removed from those where it
    is wrong, and loaded from one that has it right. Methods raise StoreError.

    buffer: where values are sealed and verified; from `Store.allocate`.
    saves: False leaves values that another instance's seal key has encrypted in the store.
    """

    def __init__(
        self, store: Store, finder: ChunkFinder, buffer: memoryview, *, saves: bool = True
    ) -> None:
        self._store = store
        self._finder = finder
        self._buffer = buffer
        self._saves = saves

    def save(self, task: ChunkTask, chunks: Sequence[Chunk]) -> Reason | None:
        """Stores chunks that are not stored, and marks those done that others can load now.

        Returns LOST if that is not all of them.
        """
        keys = [chunk.name.key for chunk in chunks]
        stored = self._finder.find(keys)
        missing = [chunk for chunk in chunks if chunk.name.key not in stored]
        for batch, slots in self._batches(missing):
            if not self._seal(task, batch, slots):
                return None
            self._store.put([chunk.name.key for chunk in batch], slots)
        if missing:
            stored |= self._finder.find([chunk.name.key for chunk in missing])
        for chunk in chunks:
            if chunk.name.key in stored:
                task.set_done(chunk.number)
        return None if stored.issuperset(keys) else Reason.LOST

    def load(self, task: ChunkTask, chunks: Sequence[Chunk]) -> Reason | None:
        """Loads chunks; marks those done whose bytes are right and in place.

        Returns why the first of the others is not.
        """
        first: Reason | None = None
        for batch, slots in self._batches(chunks):
            start = 0
            while start < len(batch):
                if task.is_over:
                    return first
                count, reason = self._get(batch[start:], slots.part(start, len(batch)))
                end = start + count + (reason is None and start + count < len(batch))
                good = self._verified(batch[start:end], slots.part(start, end))
                self._copy_out(task, good)
                first = first or reason
                if len(good) < end - start:
                    first = first or Reason.CORRUPT
                start += count + 1
        return first

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Sequence[Chunk], Slots]]:
        """Yields as many chunks at a time as the buffer holds, and slots for them."""
        if not chunks:
            return
        longest = max(len(chunk.memory) for chunk in chunks)
        slot_bytes = slot_bytes_for(longest)
        fit = len(self._buffer) // slot_bytes
        if fit == 0:
            raise ConfigError(
                f"a chunk of {longest} bytes does not fit a worker's share of PDSTORE_STAGING,"
                f" {len(self._buffer)} bytes: set it higher, or PDSTORE_WORKERS lower"
            )
        for at in range(0, len(chunks), fit):
            batch = chunks[at : at + fit]
            sizes = [chunk.header_and_payload_bytes for chunk in batch]
            yield batch, Slots(self._buffer, slot_bytes, range(len(batch)), sizes)

    def _seal(self, task: ChunkTask, batch: Sequence[Chunk], slots: Slots) -> bool:
        """Copies chunks into their slots and seals them; False if the task has ended."""
        with task.copying() as may_copy:
            if not may_copy:
                return False
            for i, chunk in enumerate(batch):
                _copy(slots.value(i)[block.HEADER_BYTES :], chunk.memory)
        for i, chunk in enumerate(batch):
            value = slots.value(i)
            value[: block.START_BYTES] = chunk.name.start(len(chunk.memory))
            block.write_checksum(value)
        return True

    def _get(self, batch: Sequence[Chunk], slots: Slots) -> tuple[int, Reason | None]:
        """Returns how many of the first were there, and why the next was not.

        The reason is None also if the next was wrong, and a tier has brought it right.
        """
        keys = [chunk.name.key for chunk in batch]
        try:
            count = count_of(self._store.get(keys, slots), keys, self._store)
        except BadValue as error:
            count = num_done_of(error, keys)
            return count, self._mend(batch[count], slots.part(count, count + 1), reason_of(error))
        return count, None if count == len(keys) else Reason.LOST

    def _mend(self, chunk: Chunk, slot: Slots, reason: Reason) -> Reason | None:
        """Removes a wrong value; returns why no tier has it right, None if the slot has it now.

        reason: why it is wrong.
        """
        opens = self._store.optional(OpensTiers)
        if opens is None:
            self._remove(self._store, chunk, reason)
            return reason
        for tier in opens.tier_stores():
            of_tier = self._read_in(tier, chunk, slot)
            if of_tier is None:
                return None
            if of_tier is not Reason.LOST:
                self._remove(tier, chunk, of_tier)
        return reason

    def _read_in(self, tier: Store, chunk: Chunk, slot: Slots) -> Reason | None:
        """Reads a value in one tier; returns why it is wrong, LOST if it is missing, or None."""
        try:
            if tier.get([chunk.name.key], slot) != 1:
                return Reason.LOST
        except BadValue as error:
            return reason_of(error)
        return _why_wrong(chunk, slot.value(0))

    def _remove(self, store: Store, chunk: Chunk, reason: Reason) -> None:
        if self._saves or reason is not Reason.OTHER_SEAL:
            store.remove([chunk.name.key])

    def _verified(self, batch: Sequence[Chunk], slots: Slots) -> list[tuple[Chunk, memoryview]]:
        """Returns the chunks whose value is right, each with its value; removes the others."""
        good = []
        for i, chunk in enumerate(batch):
            value = slots.value(i)
            reason = _why_wrong(chunk, value)
            if reason is not None:
                reason = self._mend(chunk, slots.part(i, i + 1), reason)
            if reason is None:
                good.append((chunk, value))
        return good

    def _copy_out(self, task: ChunkTask, good: Sequence[tuple[Chunk, memoryview]]) -> None:
        with task.copying() as may_copy:
            if not may_copy:
                return
            for chunk, value in good:
                _copy(chunk.memory, value[block.HEADER_BYTES :])
                task.set_done(chunk.number)


def _why_wrong(chunk: Chunk, value: memoryview) -> Reason | None:
    """Returns why a value is not the chunk's; None if it is right."""
    return block.verify(value, block.header_of(chunk.name.start(len(chunk.memory))))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies bytes without the GIL, which an assignment of slices would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def shares(sizes: Sequence[int], most: int, least_bytes: int) -> list[range]:
    """Splits chunks into at most `most` runs of about equal bytes, of `least_bytes` or more."""
    per_share = max(least_bytes, -(-sum(sizes) // most))
    starts, taken = [0], 0
    for number, size in enumerate(sizes):
        if taken >= per_share:
            starts.append(number)
            taken = 0
        taken += size
    return [range(*ends) for ends in itertools.pairwise([*starts, len(sizes)])]
