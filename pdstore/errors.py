"""Errors: every exception that pdstore raises; and the reasons and results that jobs end with.

* PDStoreError
  x ConfigError (ValueError)          a setting, a URL or an argument of a constructor is wrong
    + MissingExtra (ImportError)      a package of an extra is not installed
    + NativeError                     the native library is missing or cannot be built or loaded
  x LayoutError (ValueError)          KV tensors, block ids or token counts do not fit the layout
  x DeviceError (RuntimeError)        a thread could not be put on its device
  x SwapError (RuntimeError)          a block copy failed, or host memory could not be pinned
  x StoreError                        the store failed; a missing block is a number, never an error
    + StoreUnavailable (ConnectionError)
    + StoreTimeout (TimeoutError)
    + StoreFull
    + StoreDenied (PermissionError)
    + StoreClosed
    + BadValue                        a stored value must not be used, and is to be removed
      - WrongLength                   not as long as its key says
      - OtherSeal                     encrypted with a key that this instance lacks
      - Forged                        not confirmed by its seal key: damaged, moved or made up
  x JobError                          a save or a load ended before its work was done
    + JobDeadline (TimeoutError)
    + JobCancelled
    + QueueFull
    + ReadOnly
    + PoolClosed
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PDStoreError(Exception):
    """Base of every error of this package."""


class ConfigError(PDStoreError, ValueError):
    """A setting, a store URL or an argument is wrong; the message says what to write instead."""


class MissingExtra(ConfigError, ImportError):
    """A package that this feature needs is not installed; the message holds the install command."""


class NativeError(ConfigError):
    """The native library is missing, or cannot be built or loaded."""


class LayoutError(PDStoreError, ValueError):
    """KV tensors, block ids or token counts do not fit the layout."""


class DeviceError(PDStoreError, RuntimeError):
    """A thread could not be put on its device, so nothing ran there."""


class SwapError(PDStoreError, RuntimeError):
    """A device call of a block copy, or of pinning memory, failed.

    device_code: the device runtime's error code; 0 if there is none.
    call: the name of the call that failed.
    slice_number: the slice of the copy that the call was for; -1 if it was for no slice.
    poisoned: the device's context is broken for good: nothing will work in this process any more.
    """

    def __init__(
        self,
        message: str,
        *,
        device_code: int = 0,
        call: str = "",
        slice_number: int = -1,
        poisoned: bool = False,
    ) -> None:
        super().__init__(message)
        self.device_code = device_code
        self.call = call
        self.slice_number = slice_number
        self.poisoned = poisoned


class StoreError(PDStoreError):
    """The store failed after it had served `num_done` leading keys of the call.

    remedy: what to change, in the imperative, if the cause is known. The message ends with it.
    """

    def __init__(self, message: str, *, num_done: int = 0, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.num_done = num_done
        self.remedy = remedy


class StoreUnavailable(StoreError, ConnectionError):
    """Nothing answers at the store's address, or the breaker is open."""


class StoreTimeout(StoreError, TimeoutError):
    """The store did not answer in time."""


class StoreFull(StoreError):
    """The store has no room for a value and can evict nothing for it."""


class StoreDenied(StoreError, PermissionError):
    """The store refuses this user."""


class StoreClosed(StoreError):
    """The store was closed, or belongs to the parent of a forked process."""


class BadValue(StoreError):
    """The value after the first `num_done` must not be used; once removed, it is saved anew."""


class WrongLength(BadValue):
    """The value is not as long as its key says: it is corrupt."""


class OtherSeal(BadValue):
    """The value is encrypted with a key that this instance lacks, or it is not encrypted."""


class Forged(BadValue):
    """The value is not what an instance with its seal key stored under its key."""


class JobError(PDStoreError):
    """A save or a load ended before its work was done."""


class JobDeadline(JobError, TimeoutError):
    """The job's time was up."""


class JobCancelled(JobError):
    """The owner cancelled the job."""


class SaveFailed(JobError):
    """A save did not store all of its blocks; `__cause__` is the exception that stopped it."""


class QueueFull(JobError):
    """The queue has reached its limit of jobs or bytes, so the job was not taken."""


class ReadOnly(JobError):
    """This instance does not write to the pool (PDSTORE_PUBLISH=0)."""


class PoolClosed(JobError):
    """The pool was closed, or belongs to the parent of a forked process."""


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
    NOT_ADMITTED = "not_admitted"  # a save's blocks are worth less than those that would go
    STORE_DENIED = "store_denied"
    STORE_ERROR = "store_error"  # any other error of the store
    QUEUE_FULL = "queue_full"  # dropped: the queue has reached its limit
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

    num_tokens: for a load, how many leading tokens of the prompt have their KV in the paged cache,
      so that the engine can compute on after them; for a save, how many leading tokens another
      process can load now.
    reason: why these are not all tokens; None if they are.
    error: the exception behind the reason, if there was one.
    """

    num_tokens: int
    reason: Reason | None = None
    error: Exception | None = None


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
