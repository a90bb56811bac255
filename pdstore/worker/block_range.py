"""BlockRange: neighbouring blocks of a prompt, the share of a job that a worker takes at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

RANGE_BYTES = 32 << 20
"""About how much a worker takes at a time. Smaller ranges lose to Python's lock, larger ones leave
the cores' caches."""


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


def ranges_of(
    first: int, stop: int, num_bytes: int, range_bytes: int = RANGE_BYTES
) -> list[BlockRange]:
    """Splits the blocks first..stop, which have `num_bytes` bytes, into even ranges.

    A range has `range_bytes` or more, so that few blocks are one range.
    """
    count = max(1, min(num_bytes // range_bytes, stop - first))
    ends = [first + (stop - first) * i // count for i in range(count + 1)]
    return [BlockRange(*ends) for ends in pairwise(ends)]
