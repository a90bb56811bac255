"""Turns the system's errors into the store's."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from pdstore.errors import (
    PDStoreError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.native.abi import OTHER_LENGTH

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KINDS: dict[int, type[StoreError]] = {
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    **dict.fromkeys(FULL, StoreFull),
    errno.ETIMEDOUT: StoreTimeout,
    **dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENXIO), WrongLength),  # no regular file
    OTHER_LENGTH: WrongLength,
}


def error_of(label: str, why: int, what: str, num_done: int = 0) -> StoreError:
    """Returns the error for an errno, or for OTHER_LENGTH."""
    text = "not the length that was asked for" if why == OTHER_LENGTH else os.strerror(why)
    return _KINDS.get(why, StoreUnavailable)(f"{label}: {text}: {what}", num_done=num_done)


@contextlib.contextmanager
def named_error(label: str, what: str, num_done: int = 0) -> Iterator[None]:
    """Turns an OSError inside into the error for its errno."""
    try:
        yield
    except PDStoreError:  # some of them are OSErrors too
        raise
    except OSError as error:
        raise error_of(label, error.errno or 0, what, num_done) from error
