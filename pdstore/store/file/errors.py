"""Turns the system's errors into the store's."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
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

OTHER_LENGTH = -1
"""Beside the errnos: a file does not have the expected length."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KINDS: dict[int, type[StoreError]] = {
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    **dict.fromkeys((*FULL, errno.EFBIG), StoreFull),
    errno.ETIMEDOUT: StoreTimeout,
    **dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENXIO), WrongLength),  # no regular file
    OTHER_LENGTH: WrongLength,
}


def error_of(label: str, why: int, what: str, num_done: int = 0) -> StoreError:
    """Returns the error for an errno, or for OTHER_LENGTH."""
    text = "not the length that was asked for" if why == OTHER_LENGTH else os.strerror(why)
    remedy = ""
    with contextlib.suppress(OSError):
        status = os.statvfs(label.partition("://")[2])
        if why == errno.ENOSPC and status.f_files and status.f_favail < 4:  # a put takes up to 2
            text, remedy = "no inodes are left", "delete files, or make the file system with more"
    if why == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        remedy = f"a file may have {most} bytes: raise ulimit -f (LimitFSIZE= of systemd)"
    said = f"{label}: {text}: {what}"
    return _KINDS.get(why, StoreUnavailable)(said, num_done=num_done, remedy=remedy)


@contextlib.contextmanager
def named_error(label: str, what: str, num_done: int = 0) -> Iterator[None]:
    """Turns an OSError inside into the error for its errno."""
    try:
        yield
    except PDStoreError:  # some of them are OSErrors too
        raise
    except OSError as error:
        raise error_of(label, error.errno or 0, what, num_done) from error
