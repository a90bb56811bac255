"""ChecksumFiles: values as files, with checksums taken in the pass that reads them."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence

from pdstore.format.block import HEADER_BYTES, checksum
from pdstore.native.library import Library, address_of
from pdstore.store.base import Slots
from pdstore.store.file.plain import Ended, read_values


class ChecksumFiles:
    """Reads by the native library; without it, in Python with one more pass.

    library: returns the library or None, and is called at the first use. The attribute of this name
      is None before that.
    """

    def __init__(self, library: Callable[[], Library | None]) -> None:
        self._find = library
        self.library: Library | None = None

    def read(self, paths: Sequence[str], slots: Slots, checksums: MutableSequence[int]) -> Ended:
        """Reads as `read_values` does, and writes the i-th value's checksum to `checksums[i]`."""
        library = self._used() if paths else None
        if library is None:
            ended = read_values(paths, slots)
            sums = [checksum(slots.value(i)) for i in range(ended.num_done)]
        else:
            sums, why = library.read_files(paths, addresses_of(slots), slots.sizes)
            ended = Ended(len(sums), why)
        checksums[: len(sums)] = sums
        return ended

    def _used(self) -> Library | None:
        self.library = self._find()
        return self.library


def check_sizes(slots: Slots) -> None:
    """Raises ValueError for a value that is too short to hold a checksum."""
    if min(slots.sizes, default=HEADER_BYTES) < HEADER_BYTES:
        raise ValueError(f"a value of fewer than {HEADER_BYTES} bytes has no checksum")


def addresses_of(slots: Slots) -> list[int]:
    """Returns where the slots lie in memory."""
    base = address_of(slots.view)
    return [base + number * slots.slot_bytes for number in slots.numbers]
