"""Leases: the modification times that promise values' lives, renewed for many at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from pdstore.native.library import Library
from pdstore.store.file.plain import Ended


class Leases:
    """Renews leases in one call of the native library: the caller waits once for Python's lock.

    Without the library there is a call for each value.

    lease_s: how long values live from their last use on.
    library: returns the library if it need not be built, else None: no lookup builds it.
    """

    def __init__(self, lease_s: float, library: Callable[[], Library | None]) -> None:
        self._lease_ns, self._library = int(lease_s * 1e9), library

    def renew(self, paths: Sequence[str]) -> Ended:
        """Renews the leases of files in turn, until one is missing or errs."""
        now = time.time_ns()
        library = self._library() if len(paths) > 1 else None
        if library is not None:
            return Ended(*library.lease_files(paths, now, now + self._lease_ns))
        num_done = 0
        try:
            for path in paths:
                os.utime(path, ns=(now, now + self._lease_ns), follow_symlinks=False)
                num_done += 1
        except OSError as error:
            return Ended(num_done, error.errno or 0)
        return Ended(num_done, 0)
