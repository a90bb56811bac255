"""The nouns that all modules share: keys, slots, matches, jobs, reasons."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

BlockKey = NewType("BlockKey", str)
"""What a store sees: ASCII text that names one value. Made by `pdstore.keys` only."""


class Reason(str, enum.Enum):
    """Why leading blocks were not found, loaded or saved; also a label of the metrics."""

    ABSENT = "absent"  # nobody stored the next block, or it was evicted
    LOST = "lost"  # matched, and gone when it was read
    CORRUPT = "corrupt"  # checksum, header or length is wrong: removed
    FOREIGN = "foreign"  # an intact value that belongs to another key: removed
    NAMESPACE = "namespace"  # the other instance's weights, layout or format differ
    OTHER_POOL = "other_pool"  # the other instance writes to another store
    HANDOFF_FAILED = "handoff_failed"  # P said that it could not publish everything
    HANDOFF_LATE = "handoff_late"  # P's marker did not appear before D's deadline
    DEADLINE = "deadline"  # the job's time was up
    STORE_DOWN = "store_down"  # unreachable, or the breaker is open
    STORE_SLOW = "store_slow"  # a store call timed out
    STORE_FULL = "store_full"
    STORE_DENIED = "store_denied"
    STORE_ERROR = "store_error"  # any other error of the store
    QUEUE_FULL = "queue_full"  # dropped: the queue is at its bound
    NO_SLOTS = "no_slots"  # no staging slot came free in time
    CANCELLED = "cancelled"
    CLOSED = "closed"
    READ_ONLY = "read_only"  # PDSTORE_PUBLISH=0
    FAULT = "fault"  # a bug or a device error in pdstore itself


class Direction(enum.Enum):
    """Which way blocks move."""

    LOAD = "load"  # store -> paged cache
    SAVE = "save"  # paged cache -> store


@dataclass(frozen=True)
class Slots:
    """Some slots of one staging buffer, in the order of the keys they go with.

    `numbers[i]` is where the i-th value starts, in units of `slot_bytes` from the start of `view`;
    `sizes[i]` is its length in bytes: what `put` stores, and exactly what `get` must find.
    """

    view: memoryview  # format "B", writable, the whole buffer
    slot_bytes: int
    numbers: Sequence[int]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def piece(self, i: int) -> memoryview:
        """The bytes of the i-th value."""
        start = self.numbers[i] * self.slot_bytes
        return self.view[start : start + self.sizes[i]]

    def part(self, start: int, stop: int) -> Slots:
        """The slots start..stop of these, for working in batches."""
        return replace(self, numbers=self.numbers[start:stop], sizes=self.sizes[start:stop])


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    num_tokens: of a load, the leading tokens of the prompt whose KV is in the paged cache now; of a
      save, the leading tokens that another process can load now.
    reason: why it is not all of them; None if it is.
    error: the exception behind the reason, if there was one.
    """

    num_tokens: int
    reason: Reason | None = None
    error: Exception | None = None
