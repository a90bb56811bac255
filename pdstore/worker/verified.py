"""Verified: the outcome of a read whose values were looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.outcome import Reason
from pdstore.worker.values import Value


class Verified(NamedTuple):
    """The outcome of a read: how many of the first values are right, and why not more.

    num_read: how many of the first values the store brought, right or wrong; set by a mover.
    """

    num_right: int
    reason: Reason | None = None
    error: StoreError | None = None
    num_read: int = 0


def wrong_values(
    values: Sequence[Value], view: Callable[[int], memoryview], sums: Sequence[int]
) -> dict[int, Reason]:
    """Returns which values must not be used, by index, and why.

    view: returns the bytes of one. sums: the `block.checksum` of each.
    """
    return {
        i: block.verify(view(i), value.header, sums[i]) or Reason.CORRUPT
        for i, value in enumerate(values)
        if not block.is_right(view(i), value.start, sums[i])
    }
