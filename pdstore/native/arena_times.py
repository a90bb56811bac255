"""ArenaTimes: for how long an arena keeps what."""

from __future__ import annotations

from typing import NamedTuple


class ArenaTimes(NamedTuple):
    """Times of an open arena, in seconds.

    lease_s: of a lease that a match or a borrow gives.
    fresh_s: after its publication a value is not evicted for so long.
    short_lived_s: life of tails and markers after their last use.
    rest_s: for so long nobody gets what a dead process had reserved.
    lock_timeout_s: a call that does not get the lock in this time raises StoreTimeout.
    """

    lease_s: float
    fresh_s: float
    short_lived_s: float
    rest_s: float
    lock_timeout_s: float
