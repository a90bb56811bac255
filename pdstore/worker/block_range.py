"""BlockRange: neighbouring blocks of a prompt, the share of a job that a worker takes at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

RANGE_BYTES = 32 << 20
"""About how much a worker takes at a time of much. Smaller ranges lose to Python's lock, larger
ones leave the cores' caches."""
_MANY = 8
"""Where there is less, it is split for this many workers: what is waited for is the longest."""


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


def ranges_of(
    first: int, stop: int, num_bytes: int, range_bytes: int = RANGE_BYTES
) -> list[BlockRange]:
    """Splits the blocks first..stop, which have `num_bytes` bytes, into even ranges.

    Ranges have about `range_bytes`; less than eight of these are split into eight, but into none
    below an eighth of `range_bytes`.
    """
    least_bytes = max(1, range_bytes // _MANY)
    wanted = max(num_bytes // range_bytes, min(_MANY, num_bytes // least_bytes))
    count = max(1, min(wanted, stop - first))
    ends = [first + (stop - first) * i // count for i in range(count + 1)]
    return [BlockRange(*ends) for ends in pairwise(ends)]
