"""StripedLoad: one load that several workers carry at once, a stripe of blocks each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

from pdstore.job import Job
from pdstore.types import Direction, Reason

STRIPE_BYTES = 32 << 20
"""A load of at least twice as much runs on several workers."""


def stripes(first: int, last: int, num_bytes: int, most: int) -> list[tuple[int, int]]:
    """The blocks first..last, which have so many bytes, in even stripes; one where they are few."""
    count = max(1, min(most, num_bytes // STRIPE_BYTES, last - first))
    ends = [first + (last - first) * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _nothing(job: Job) -> Reason | None:
    raise AssertionError("the stripes do the work")


class StripedLoad(Job):
    """A load whose blocks are split over stripes, which run side by side.

    One worker gets, verifies and scatters one window after the other; several overlap these. It
    ends when all stripes have ended, and brought the tokens before the first gap. With a gap the
    stripes behind it are cancelled.

    stripes: in the order of the prompt; each began where the one before it ends.
    """

    def __init__(self, stripes: Sequence[Job], first_token: int) -> None:
        num_bytes = sum(stripe.num_bytes for stripe in stripes)
        super().__init__(
            Direction.LOAD, _nothing, num_bytes=num_bytes, seconds=0.0, progress=first_token
        )
        self._stripes = tuple(stripes)
        self._num_left = len(stripes)
        self._counting = threading.Lock()

    def follow(self) -> None:
        """All stripes are submitted."""
        for stripe in self._stripes:
            stripe.on_end(self._stripe_ended)

    def cancel(self) -> None:
        for stripe in self._stripes:
            stripe.cancel()

    def _stripe_ended(self, stripe: Job) -> None:
        result = stripe.result
        if result is not None and result.reason is not None:
            for later in self._stripes[self._stripes.index(stripe) + 1 :]:
                later.cancel()
        with self._counting:
            self._num_left -= 1
            if self._num_left:
                return
        results = [each.result for each in self._stripes if each.result is not None]
        whole = next((r for r in results if r.reason is not None), results[-1])
        self.progress = whole.num_tokens
        self.end(whole.reason, whole.error)
