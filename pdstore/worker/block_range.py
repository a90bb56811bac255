"""BlockRange: neighbouring blocks of a prompt, the share of a job that a worker takes at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

RANGE_BYTES = 32 << 20
"""About how much a worker takes at a time of much. Smaller ranges lose to Python's lock, larger
ones leave the cores' caches."""
_MANY = 8
RANGES_AT_ONCE = 8
"""Ranges that one call of the library saves: enough for a prompt of 2,048 tokens of an 8B model.
Several workers still share the last chunk of a long one."""


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


class Split(NamedTuple):
    """The way in which a job's blocks are split into ranges, and how early a save begins.

    range_bytes: about how much is one range.
    many: a job smaller than so many ranges is split into so many smaller ones, because its end is
      the slowest worker's; but none has less than `range_bytes / many`. 1: no such split, because
      the library spreads the work of one range over the processors.
    at_once: ranges that a worker saves in one turn, because one call of the library takes so many.
    early_ranges: layer ranges of at least so many block ranges are saved before later ones are
      computed. Each is work in Python of its own; smaller ones go together.
    """

    range_bytes: int = RANGE_BYTES
    many: int = _MANY
    at_once: int = 1
    early_ranges: int = 4

    @classmethod
    def native(cls, range_bytes: int) -> Split:
        """The split for a mover that does little in Python for a range."""
        return cls(range_bytes, many=1, at_once=RANGES_AT_ONCE, early_ranges=2)

    @property
    def early_bytes(self) -> int:
        """Least bytes of a layer range that is saved during the forward."""
        return self.early_ranges * self.range_bytes

    def ranges(self, first: int, stop: int, num_bytes: int) -> list[BlockRange]:
        """Splits the blocks first..stop, which have `num_bytes` bytes, into even ranges."""
        least_bytes = max(1, self.range_bytes // self.many)
        wanted = max(num_bytes // self.range_bytes, min(self.many, num_bytes // least_bytes))
        count = max(1, min(wanted, stop - first))
        ends = [first + (stop - first) * i // count for i in range(count + 1)]
        return [BlockRange(*ends) for ends in pairwise(ends)]
