"""Errors: the exceptions that pdstore raises, and the reasons and results with which jobs end.

* PDStoreError
  x ConfigError (ValueError)          a setting, a URL or an argument of a constructor is wrong
    + MissingExtra (ImportError)      a package that an optional feature needs is missing
    + NativeError                     the native library is missing or cannot be built or loaded
  x LayoutError (ValueError)          KV tensors, block ids or token counts do not fit the layout
  x DeviceError (RuntimeError)        a thread could not be put on its device
  x IllegalCall (RuntimeError)        an engine calls `EngineRequest` in a wrong order
  x SwapError (RuntimeError)          a block copy failed, or host memory could not be pinned
  x StoreError                        the store failed; a missing block raises no exception
    + StoreUnavailable (ConnectionError)
    + StoreTimeout (TimeoutError)
    + StoreFull
    + ValueRefused                    a value is longer than the server takes; the store works
    + StoreDenied (PermissionError)
    + StoreClosed
    + BadValue                        a stored value must not be used and should be removed
      - WrongLength                   longer or shorter than values with its key are
      - OtherSeal                     encrypted with a seal key that this instance lacks
      - Forged                        its seal key proves it damaged, moved or made up
  x JobError                          a save or a load ended before its work was done
    + JobDeadline (TimeoutError)
    + JobCancelled
    + SaveFailed
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


class IllegalCall(PDStoreError, RuntimeError):
    """The request's phase does not allow the call; the message says which calls it allows.

    This is a defect of the engine or of its adapter. The call has changed nothing.
    """

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class SwapError(PDStoreError, RuntimeError):
    """A call to the device's runtime failed, which was to copy a block or to pin host memory.

    device_code: the device runtime's error code; 0 if there is none.
    call: the name of the call that failed.
    slice_number: the number of the slice that the call was to copy; -1 if it was to copy none.
    poisoned: True if the device's context is broken for good: in this process no call to the device
      will succeed any more.
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
    """The store failed. Before, it had served the first `num_done` keys of the call.

    remedy: tells the user what to change, at the message's end; empty if the cause is not known.
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
    """The store has no room for a value, and cannot evict other values to make room."""


class ValueRefused(StoreError):
    """The store works, and does not take or give a value as long as that of key `num_done`."""


class StoreDenied(StoreError, PermissionError):
    """The store denies this user access."""


class StoreClosed(StoreError):
    """The store was closed, or the parent process opened it before it forked this process."""


class BadValue(StoreError):
    """The value of the key at index `num_done` must not be used and should be removed."""


class WrongLength(BadValue):
    """The value is corrupt: it is longer or shorter than values with its key are."""


class OtherSeal(BadValue):
    """The value is encrypted with a seal key that this instance lacks, or it is not encrypted."""


class Forged(BadValue):
    """The value's seal key proves that no instance stored this value under this block key."""


class JobError(PDStoreError):
    """A save or a load ended before its work was done."""


class JobDeadline(JobError, TimeoutError):
    """The job did not end before its deadline."""


class JobCancelled(JobError):
    """The job was cancelled."""


class SaveFailed(JobError):
    """A save did not store all of its blocks; `__cause__` is the exception that stopped it."""


class QueueFull(JobError):
    """The queue had reached its limit of jobs or bytes, so it refused the job."""


class ReadOnly(JobError):
    """This instance does not write to the pool (PDSTORE_PUBLISH=0)."""


class PoolClosed(JobError):
    """The pool was closed, or the parent process opened it before it forked this process."""


class Severity(enum.Enum):
    """The weight of a reason; the last two are labels of the Prometheus alerts, too."""

    ORDINARY = "ordinary"  # nothing failed: the work was no longer wanted, or not worth it
    NOTICE = "notice"  # expected of a new prompt, of an instance that stops, or of a setting
    WARNING = "warning"  # a fault or a lack that makes D compute prompts
    CRITICAL = "critical"  # every prompt is computed until somebody acts, or values are damaged


class Cause(enum.Enum):
    """A class of reasons. Code asks for the class, so a new reason is treated as its class is."""

    MISSING = "the pool lacks a block"
    BAD_VALUE = "no instance can use the value, so each instance that reads it removes it"
    SEALED = "only an instance with another seal key can use the value"
    MISMATCH = "P and D differ in what they must share; PrefixCacheManager logs the difference"
    HANDOFF = "P did not say in time that the whole prompt is stored"
    SLOW = "the store was too slow for a job or a lookup"
    STORE = "the store refuses or fails"
    OVERLOAD = "more work waits in this instance than it can do"
    CHOICE = "this instance does not save it, by a rule or a setting"
    ENDED = "a client left or an instance stopped, which says nothing about the store"
    DEFECT = "pdstore or a device failed"


class Reason(str, enum.Enum):
    """A reason why blocks were not found, loaded or saved. Metrics have it as a label.

    `pdstore.telemetry.reasons.ADVICE` has what each means in full, and what to look at.

    cause: its class.
    severity: its weight.
    """

    _value_: str
    cause: Cause
    severity: Severity

    def __new__(  # the defaults are for type checkers: `Reason("absent")` finds a reason
        cls, value: str, cause: Cause = Cause.DEFECT, severity: Severity = Severity.WARNING
    ) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.cause = cause
        reason.severity = severity
        return reason

    @property
    def value(self) -> str:  # without it, type checkers take the value for Any
        """The reason's text, which metrics and answers hold."""
        return self._value_

    ABSENT = "absent", Cause.MISSING, Severity.NOTICE  # the block was never stored, or was evicted
    LOST = "lost", Cause.MISSING, Severity.WARNING  # a lookup found the block, the load did not
    CORRUPT = "corrupt", Cause.BAD_VALUE, Severity.CRITICAL  # a wrong checksum, header or length
    FOREIGN = "foreign", Cause.BAD_VALUE, Severity.CRITICAL  # the intact value of another key
    OTHER_SEAL = "other_seal", Cause.SEALED, Severity.CRITICAL  # this instance lacks its seal key
    FORGED = "forged", Cause.BAD_VALUE, Severity.CRITICAL  # its seal is broken: damaged or made up
    NAMESPACE = "namespace", Cause.MISMATCH, Severity.CRITICAL  # weights, layout, format or salt
    OTHER_POOL = "other_pool", Cause.MISMATCH, Severity.CRITICAL  # P writes to another store
    HANDOFF_FAILED = "handoff_failed", Cause.HANDOFF, Severity.WARNING  # P could not store it all
    HANDOFF_LATE = "handoff_late", Cause.HANDOFF, Severity.WARNING  # no marker before the deadline
    HANDOFF_DEAD = "handoff_dead", Cause.HANDOFF, Severity.WARNING  # P's heartbeat has stopped
    HANDOFF_GONE = "handoff_gone", Cause.HANDOFF, Severity.WARNING  # the pool has no sign of it
    DEADLINE = "deadline", Cause.SLOW, Severity.WARNING  # a job or a lookup did not end in time
    STORE_DOWN = "store_down", Cause.STORE, Severity.CRITICAL  # no answer, or an open breaker
    STORE_SLOW = "store_slow", Cause.SLOW, Severity.WARNING  # a store call timed out
    STORE_FULL = "store_full", Cause.STORE, Severity.WARNING
    NOT_ADMITTED = "not_admitted", Cause.CHOICE, Severity.ORDINARY  # would evict what is worth more
    STORE_DENIED = "store_denied", Cause.STORE, Severity.CRITICAL
    STORE_ERROR = "store_error", Cause.STORE, Severity.WARNING  # any other error of the store
    QUEUE_FULL = "queue_full", Cause.OVERLOAD, Severity.WARNING  # too many jobs or bytes wait
    NO_SLOTS = "no_slots", Cause.OVERLOAD, Severity.WARNING  # no staging slot became free in time
    CANCELLED = "cancelled", Cause.ENDED, Severity.ORDINARY
    CLOSED = "closed", Cause.ENDED, Severity.NOTICE
    READ_ONLY = "read_only", Cause.CHOICE, Severity.NOTICE  # PDSTORE_PUBLISH=0
    FAULT = "fault", Cause.DEFECT, Severity.WARNING  # a bug, or an error of a device or a plug-in


class Direction(enum.Enum):
    """The direction in which a job moves blocks."""

    LOAD = "load"  # store -> paged cache
    SAVE = "save"  # paged cache -> store


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    num_tokens: for a load, the number of leading tokens of the prompt whose KV is in the paged
      cache now; the engine need not compute them. For a save, the number of leading tokens that
      another process can load now.
    reason: why the job did not do all of its work; None if it did.
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
    """Returns the reason that `_REASONS` gives for an exception; FAULT if it gives none."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.FAULT)


def reasons_with(*causes: Cause) -> frozenset[Reason]:
    """Returns the reasons of these classes."""
    return frozenset(reason for reason in Reason if reason.cause in causes)


def release_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and of its causes, because they hold slots and tensors."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            rest += (each.__cause__, each.__context__)
