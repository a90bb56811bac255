"""Writer: puts values into a pool's directory; makes room and missing directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.store.base import Lifecycle, Slots
from pdstore.store.file.bell import Bell
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.errors import FULL, named_error
from pdstore.store.file.eviction import Evictor
from pdstore.store.file.plain import Ended

WriteValues = Callable[[str, Sequence[str], Slots], Ended]
"""Writes slots to paths by way of a temporary name, as `plain.write_values` does."""


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

    def put(self, keys: Sequence[BlockKey], slots: Slots, write: WriteValues) -> int:
        """Stores the slots under their keys by `write`. Raises StoreError as `Store.put` does."""
        paths = [self._directory.path(key) for key in keys]
        n = next((i for i, path in enumerate(paths) if not os.access(path, os.F_OK)), len(keys))
        while n < len(keys):
            stop = self._admit(keys, slots.sizes, n)
            try:
                self._write(keys, paths, slots, range(n, stop), write)
            finally:
                self._evictor.settle(slots.sizes[n:stop])
                self._bell.ring(keys[n:stop])
            n = stop
        return n

    def _admit(self, keys: Sequence[BlockKey], sizes: Sequence[int], start: int) -> int:
        """Returns the end of the values from `start` on that have room. Raises StoreFull."""
        for n in range(start, len(keys)):
            with named_error(self._label, keys[n], n):
                if kind_of(keys[n]) is Kind.HANDOFF:
                    self._evictor.admit_anyway(sizes[n])
                elif not self._evictor.admit(sizes[n]):
                    if n > start:
                        return n
                    raise StoreFull(f"{self._label}: all is leased: {keys[n]}", num_done=n)
        return len(keys)

    def _write(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        slots: Slots,
        part: range,
        write: WriteValues,
    ) -> None:
        n, num_mends = part.start, 0
        while n < part.stop:
            done, why = self._write_once(paths[n : part.stop], slots.part(n, part.stop), write)
            n, num_mends = n + done, 0 if done else num_mends
            if why:
                with named_error(self._label, keys[n], n):
                    self._mend(why, keys[n], slots.sizes[n], num_mends)
                num_mends += 1

    def _write_once(self, paths: Sequence[str], slots: Slots, write: WriteValues) -> Ended:
        """Writes values up to the first one whose directory has to be made, that one too.

        More directories at once would take the inodes that values need.
        """
        num_ready = 0
        try:
            is_made = False
            while num_ready < len(paths) and not is_made:
                is_made = self._directory.make_place(paths[num_ready])
                num_ready += 1
        except OSError as error:
            if num_ready == 0:
                return Ended(0, error.errno or 0)
        return write(self._directory.temporary(), paths[:num_ready], slots.part(0, num_ready))

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
