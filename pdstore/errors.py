"""Errors: every exception that pdstore raises.

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
    slice_number: the slice of the copy that it was for; -1 if it was for none.
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

    remedy: what to change, in the imperative, where the cause is known; it ends the message.
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
    """A save stored less than all of its blocks; its cause is the exception behind it, if any."""


class QueueFull(JobError):
    """The queue is at its bound of jobs or bytes, so the job was not taken."""


class ReadOnly(JobError):
    """This instance does not write to the pool (PDSTORE_PUBLISH=0)."""


class PoolClosed(JobError):
    """The pool was closed, or belongs to the parent of a forked process."""
