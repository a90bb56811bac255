"""Writer: puts values into a pool's directory; makes room and missing directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from pdstore.errors import StoreError, StoreFull
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.store.base import Lifecycle
from pdstore.store.file.bell import Bell
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.errors import FULL, named_error
from pdstore.store.file.eviction import Evictor
from pdstore.store.file.plain import Ended

WriteValues = Callable[[str, Sequence[str], range], Ended]
"""Writes some of a call's values to their paths by way of temporary names, as `plain.write_values`
does; the range has their numbers."""


class Writer:
    """Asks the evictor for room, writes, and tries again after each mend."""

    def __init__(
        self,
        label: str,
        lifecycle: Lifecycle,
        directory: PoolDirectory,
        evictor: Evictor,
        bell: Bell,
    ) -> None:
        self._label, self._lifecycle = label, lifecycle
        self._directory, self._evictor, self._bell = directory, evictor, bell

    def put(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        sizes: Sequence[int],
        write: WriteValues,
    ) -> int:
        """Stores values under their keys by `write`. Raises StoreError as `Store.put` does."""
        n = next((i for i, path in enumerate(paths) if not os.access(path, os.F_OK)), len(keys))
        while n < len(keys):
            stop = self._admit(keys, sizes, n)
            try:
                self._write(keys, paths, sizes, range(n, stop), write)
            finally:
                self._evictor.settle(sizes[n:stop])
                self._bell.ring()
            n = stop
        return n

    def _admit(self, keys: Sequence[BlockKey], sizes: Sequence[int], start: int) -> int:
        """Returns the end of the values from `start` on that have room. Raises StoreFull."""
        with named_error(self._label, keys[start], start):
            if len(keys) - start > 1 and self._evictor.admit(sizes[start:]):
                return len(keys)
        n = start
        try:
            for n in range(start, len(keys)):
                self._admit_one(keys[n], sizes[n], n)
        except StoreError:
            if n == start:
                raise
            return n  # those before it are written first, and then this one is met again
        return len(keys)

    def _admit_one(self, key: BlockKey, num_bytes: int, number: int) -> None:
        with named_error(self._label, key, number):
            if kind_of(key) is Kind.HANDOFF:
                self._evictor.admit_anyway(num_bytes)
            elif not self._evictor.admit([num_bytes]):
                raise StoreFull(f"{self._label}: all is leased: {key}", num_done=number)

    def _write(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        sizes: Sequence[int],
        part: range,
        write: WriteValues,
    ) -> None:
        n, num_mends = part.start, 0
        while n < part.stop:
            rest = range(n, part.stop)
            done, why = write(self._directory.temporary(), paths[n : part.stop], rest)
            n, num_mends = n + done, 0 if done else num_mends
            if why:
                with named_error(self._label, keys[n], n):
                    self._mend(why, keys[n], sizes[n], num_mends)
                num_mends += 1

    def _mend(self, why: int, key: BlockKey, num_bytes: int, num_mends: int) -> None:
        """Mends what kept a value from being written. Raises OSError if nothing is left to try."""
        if why == errno.ENOENT and num_mends == 0:
            self._lifecycle.check()
            self._directory.repair()
        elif why in FULL and num_mends == 0:
            self._evictor.make_room(num_bytes)
        elif why in FULL and num_mends == 1 and kind_of(key) is Kind.HANDOFF:
            self._evictor.sacrifice()
        else:
            raise OSError(why, os.strerror(why))
