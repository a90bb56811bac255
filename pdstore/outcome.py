"""Outcomes of jobs and lookups: their reasons and results."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdstore.errors import (
    BadValue,
    Forged,
    JobCancelled,
    JobDeadline,
    OtherSeal,
    PoolClosed,
    QueueFull,
    ReadOnly,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)


class Reason(str, enum.Enum):
    """A reason why blocks were not found, loaded or saved; also a label of the metrics."""

    ABSENT = "absent"  # nobody stored the next block, or it was evicted
    LOST = "lost"  # matched, but gone when it was read
    CORRUPT = "corrupt"  # checksum, header or length is wrong: removed
    FOREIGN = "foreign"  # an intact value that belongs to another key: removed
    OTHER_SEAL = "other_seal"  # encrypted with a key that is not this instance's
    FORGED = "forged"  # not what a holder of its seal key stored under this key: removed
    NAMESPACE = "namespace"  # the other instance's weights, layout or format differ
    OTHER_POOL = "other_pool"  # the other instance writes to another store
    HANDOFF_FAILED = "handoff_failed"  # P said that it could not publish everything
    HANDOFF_LATE = "handoff_late"  # P's marker did not appear before D's deadline
    HANDOFF_DEAD = "handoff_dead"  # P died before its marker: it stopped beating
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
    FAULT = "fault"  # a bug, an error of a device, or an exception that no store may raise


class Direction(enum.Enum):
    """The way that blocks move."""

    LOAD = "load"  # store -> paged cache
    SAVE = "save"  # paged cache -> store


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    num_tokens: of a load, the leading tokens of the prompt whose KV is in the paged cache now, as
      many as the engine can compute on from; of a save, those that another process can load now.
    reason: why it is not all of them; None if it is.
    error: the exception behind the reason, if there was one.
    busy_s: seconds in which any worker was at it; a load that follows a hand-off also waits.
    """

    num_tokens: int
    reason: Reason | None = None
    error: Exception | None = None
    busy_s: float = field(default=0.0, compare=False, repr=False)


_REASONS: tuple[tuple[type[Exception], Reason], ...] = (
    (StoreTimeout, Reason.STORE_SLOW),
    (StoreUnavailable, Reason.STORE_DOWN),
    (StoreFull, Reason.STORE_FULL),
    (StoreDenied, Reason.STORE_DENIED),
    (StoreClosed, Reason.CLOSED),
    (OtherSeal, Reason.OTHER_SEAL),
    (Forged, Reason.FORGED),
    (BadValue, Reason.CORRUPT),
    (StoreError, Reason.STORE_ERROR),
    (JobDeadline, Reason.DEADLINE),
    (JobCancelled, Reason.CANCELLED),
    (QueueFull, Reason.QUEUE_FULL),
    (ReadOnly, Reason.READ_ONLY),
    (PoolClosed, Reason.CLOSED),
)


def reason_of(error: Exception) -> Reason:
    """Returns the reason for an exception; FAULT for one that is not pdstore's own."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.FAULT)
