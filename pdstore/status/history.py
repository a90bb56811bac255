"""History: the last hour of an instance's counters, which the page shows as small curves.

The page's own thread reads the counters every half minute, so no request waits for it. The history
keeps 121 samples of a few numbers, whatever the instance does.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

EVERY_S = 30.0
_SPAN_S = 3600.0
_LEAST_S = 5.0  # a rate of less would jump
_RECENT_S = 300.0  # of the numbers about the last minutes


@dataclass(frozen=True)
class Curve:
    """A number of the page that is shown as it was over the last hour.

    name: its title on the page.
    counted: counters whose increases are added up.
    of: counters of which the increase of `counted` is a share; without any, it is shown by second.
    """

    name: str
    counted: tuple[str, ...]
    of: tuple[str, ...] = ()

    def totals(self, counters: Mapping[str, float]) -> Totals:
        """Returns the sums of `counted` and of `of`; a counter that is not there is 0."""
        counted, of = (
            sum(counters.get(name, 0.0) for name in names) for names in (self.counted, self.of)
        )
        return Totals(counted, of)

    def value(self, before: Totals, after: Totals, seconds: float) -> float | None:
        """Returns the value between two times; None for a share of nothing."""
        total = after.of - before.of if self.of else seconds
        return (after.counted - before.counted) / total if total > 0 else None


class Totals(NamedTuple):
    """The counters of one curve, added up."""

    counted: float
    of: float


class Sample(NamedTuple):
    """The counters that the curves need, at one time in seconds of the history's clock."""

    at: float
    totals: tuple[Totals, ...]


class History:
    """Keeps samples of counters for an hour. One thread adds them, and the same one asks.

    curves: what is shown of the counters.
    read: returns the counters now, by name.
    """

    def __init__(
        self,
        curves: Sequence[Curve],
        read: Callable[[], Mapping[str, float]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._curves = curves
        self._read = read
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=1 + round(_SPAN_S / EVERY_S))
        self.add_if_due()

    def add_if_due(self) -> None:
        """Takes a sample if the last one is half a minute old."""
        now = self._clock()
        if not self._samples or now - self._samples[-1].at >= EVERY_S:
            self._samples.append(self._sample(self._read()))

    def as_json(self, numbers: Mapping[str, float]) -> list[dict[str, object]]:
        """Returns each curve with its values, the oldest first, and its value of five minutes.

        numbers: the counters now, which end the last minutes.
        """
        now = self._sample(numbers)
        recent = self._at(now.at - _RECENT_S)
        samples = [*self._samples]
        if now.at - samples[-1].at >= _LEAST_S:
            samples.append(now)
        return [
            {
                "name": curve.name,
                "is_share": bool(curve.of),
                "every_s": EVERY_S,
                "values": [self._value(number, *two) for two in itertools.pairwise(samples)],
                "recent": self._value(number, recent, now),
                "recent_s": now.at - recent.at,
            }
            for number, curve in enumerate(self._curves)
        ]

    def _value(self, number: int, before: Sample, after: Sample) -> float | None:
        totals = before.totals[number], after.totals[number]
        return self._curves[number].value(*totals, after.at - before.at)

    def _sample(self, counters: Mapping[str, float]) -> Sample:
        return Sample(self._clock(), tuple(curve.totals(counters) for curve in self._curves))

    def _at(self, at: float) -> Sample:
        """Returns the newest sample that is at least as old; the oldest if none is."""
        older = [sample for sample in self._samples if sample.at <= at]
        return older[-1] if older else self._samples[0]
