"""StripedLoad: one load that several workers carry at once, a stripe of blocks each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pdstore.outcome import Direction, JobResult, Reason
from pdstore.worker.job import Job
from pdstore.worker.mover import WINDOW_BYTES

STRIPE_BYTES = WINDOW_BYTES
"""What a worker takes at a time. A load of at least twice as much runs on several."""


class Stripe(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


def stripes_of(first: int, stop: int, num_bytes: int) -> list[Stripe]:
    """The blocks first..stop, which have so many bytes, in even stripes; one where they are few."""
    count = max(1, min(num_bytes // STRIPE_BYTES, stop - first))
    ends = [first + (stop - first) * i // count for i in range(count + 1)]
    return [Stripe(*ends) for ends in pairwise(ends)]


def _nothing(job: Job) -> Reason | None:
    raise AssertionError("the carriers do the work")


def _too_late(stripe: Stripe, carrier: Job) -> Reason | None:
    """Instead of `load` after the end: what that holds is released."""
    return Reason.CANCELLED


class StripedLoad(Job):
    """A load that carriers, jobs of their own, do together: each takes the next stripe in turn.

    It ends when no stripe is being loaded and no more will be, with the tokens before the first
    gap. Behind a gap no stripe is begun. A carrier that found no worker in time is not waited for.

    stripes: in the order of the prompt.
    load: loads a stripe for a carrier, whose `progress` it moves; says why not all of it.
    seconds: for all of it.
    first_token, num_tokens: of the prompt: what is there before, and what will be.
    """

    def __init__(
        self,
        stripes: Sequence[Stripe],
        load: Callable[[Stripe, Job], Reason | None],
        num_carriers: int,
        *,
        num_bytes: int,
        seconds: float,
        first_token: int,
        num_tokens: int,
    ) -> None:
        super().__init__(
            Direction.LOAD, _nothing, num_bytes=num_bytes, seconds=seconds, progress=first_token
        )
        self._stripes, self._num_tokens = stripes, num_tokens
        self._load = load
        self._changing = threading.Lock()
        self._num_taken = 0
        self._busy: set[Job] = set()  # carriers with a stripe
        self._gaps: list[JobResult] = []
        self._is_over = False
        share = num_bytes // num_carriers
        self.carriers = tuple(self._carrier(share, seconds) for _ in range(num_carriers))
        self._num_left = num_carriers
        for carrier in self.carriers:
            carrier.on_end(self._carrier_ended)

    def cancel(self) -> None:
        for carrier in self.carriers:
            carrier.cancel()

    def _carrier(self, num_bytes: int, seconds: float) -> Job:
        carrier = Job(
            Direction.LOAD,
            self._carry,
            num_bytes=num_bytes,
            seconds=seconds,
            progress=self.progress,
        )
        carrier.is_part = True
        return carrier

    def _carry(self, carrier: Job) -> Reason | None:
        """A carrier's work: stripe after stripe."""
        while (stripe := self._take(carrier)) is not None:
            reason = self._load(stripe, carrier)
            if reason is not None:
                return reason
        return None

    def _take(self, carrier: Job) -> Stripe | None:
        """The next stripe; the carrier is done with the one before."""
        with self._changing:
            self._busy.discard(carrier)
            if self._has_more() and not carrier.done:
                self._busy.add(carrier)
                self._num_taken += 1
                return self._stripes[self._num_taken - 1]
        self._end_if_over()
        return None

    def _carrier_ended(self, carrier: Job) -> None:
        result = carrier.result
        assert result is not None
        with self._changing:
            self._num_left -= 1
            is_last = self._num_left == 0 and self._has_more()  # nobody will load the rest
            if carrier in self._busy or is_last:
                self._busy.discard(carrier)
                self._gaps.append(result)
        self._end_if_over()

    def _has_more(self) -> bool:
        return self._num_taken < len(self._stripes) and not self._gaps

    def _end_if_over(self) -> None:
        with self._changing:
            if self._is_over or self._busy or self._has_more():
                return
            self._is_over, self._load = True, _too_late
        self.cancel()  # those that wait for a worker, or are about to end
        gap = min(self._gaps, key=lambda gap: gap.num_tokens, default=JobResult(self._num_tokens))
        self.progress = gap.num_tokens
        self.end(gap.reason, gap.error)
