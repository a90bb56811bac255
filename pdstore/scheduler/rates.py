"""Rates: what a token costs to load and to compute, as measured lately."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]

_KEEP = 0.8  # of a mean's weight at each new measurement
_STALE_S = 30.0
_FEWEST_TOKENS = 16
"""Fewer tokens of a prompt in a step tell what a step costs, not what a token does."""
_FEW_TOKENS = 9  # log2 of the size up to which sizes are not told apart


@dataclass
class _Mean:
    """A mean cost: the seconds and tokens of all measurements, the older the lighter.

    measured: the same tokens, each counted whole.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    at: float = 0.0
    measured: float = 0.0


class CostTable:
    """Seconds for each token, by the power of two that a size is in.

    A size without a measurement costs what the nearest one costs. What is older than the latest
    measurement by `stale_s` counts no more: a store that has become fast or slow is another store.
    """

    def __init__(self, clock: Clock = time.monotonic, stale_s: float = _STALE_S) -> None:
        self._clock, self._stale_s = clock, stale_s
        self._means: dict[int, _Mean] = {}

    def note(self, size: float, tokens: float, seconds: float) -> None:
        """Takes up a measurement of so many tokens."""
        number, now = _class_of(size), self._clock()
        mean = self._means.get(number)
        if mean is None or now - mean.at > self._stale_s:
            mean = self._means[number] = _Mean()
        mean.tokens = mean.tokens * _KEEP + tokens
        mean.seconds = mean.seconds * _KEEP + seconds
        mean.measured += tokens
        mean.at = now

    def is_known(self, size: float, num_tokens: int) -> bool:
        """True if this size itself has been measured, with half as many tokens at least."""
        mean = self._means.get(_class_of(size))
        return mean is not None and mean.measured >= num_tokens / 2

    def per_token(self, size: float) -> float | None:
        """Returns the seconds that a token of this size costs; None before any measurement."""
        known = {number: mean for number, mean in self._means.items() if mean.tokens > 0}
        if not known:
            return None
        latest = max(mean.at for mean in known.values())
        fresh = [number for number, mean in known.items() if mean.at >= latest - self._stale_s]
        wanted = _class_of(size)
        nearest = known[min(fresh, key=lambda number: (abs(number - wanted), -number))]
        return nearest.seconds / nearest.tokens


class _Window:
    """The loads that share a store, their tokens, and their time, since one of them began.

    note: called with the tokens that were on their way at once, those that came, and the seconds.
    """

    def __init__(self, clock: Clock, note: Callable[[float, float, float], None]) -> None:
        self._clock, self._note = clock, note
        self.outstanding = 0
        self._since = self._peak = self._brought = self._busy_s = 0.0

    def started(self, num_tokens: int) -> None:
        """Takes a load of so many tokens."""
        if self.outstanding == 0:
            self._open()
        self.outstanding += num_tokens
        self._peak = max(self._peak, self.outstanding)

    def ended(self, num_tokens: int, num_brought: int, busy_s: float) -> None:
        """Takes the end of a load, which was at work for `busy_s`."""
        self.outstanding -= num_tokens
        self._brought += num_brought
        self._busy_s += busy_s
        if self.outstanding == 0 or self._brought >= 2 * self._peak:
            took = min(self._busy_s, self._clock() - self._since)
            if took > 0:
                self._note(self._peak, self._brought, took)
            self._open()

    def dropped(self, num_tokens: int) -> None:
        """Takes the end of a load that says nothing."""
        self.outstanding -= num_tokens
        if self.outstanding == 0:
            self._open()

    def _open(self) -> None:
        self._since, self._peak = self._clock(), float(self.outstanding)
        self._brought = self._busy_s = 0.0


class LoadRate:
    """Measures what loading costs, by how many tokens are on their way at once.

    Loads share the store, so no single one tells its rate. The time in which anything was loading
    is cut into windows: one ends when the store has nothing left to do, or when twice as much has
    come as was ever on its way in it, so that loads which lie across its ends weigh little.

    The first window tells of connections that are made and of memory that is written for the first
    time, and is not counted.

    A load that follows a hand-off waits for P between its blocks, for as long as P computes. Of
    such loads, which have windows of their own, only the time counts that they were at work.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._costs = CostTable(clock)
        self._has_begun = False
        self._settled = _Window(clock, self._note)
        self._following = _Window(clock, self._note)

    def started(self, num_tokens: int, *, follows: bool = False) -> None:
        """A load of so many tokens begins."""
        (self._following if follows else self._settled).started(num_tokens)

    def ended(self, num_tokens: int, num_brought: int) -> None:
        """A load that was begun has ended; it brought so many tokens."""
        self._settled.ended(num_tokens, num_brought, math.inf)

    def followed(self, num_tokens: int, num_brought: int, busy_s: float) -> None:
        """A load that follows has ended; it was at work for so many seconds."""
        self._following.ended(num_tokens, num_brought, busy_s)

    def dropped(self, num_tokens: int, *, follows: bool = False) -> None:
        """A load that was begun was given up, and how far it came is not known."""
        (self._following if follows else self._settled).dropped(num_tokens)

    def seconds(self, num_tokens: int) -> float | None:
        """Returns the time until so many more tokens are there; None if it is not known."""
        size = self._settled.outstanding + self._following.outstanding + num_tokens
        cost = self._costs.per_token(size)
        return None if cost is None else cost * size

    def _note(self, size: float, tokens: float, seconds: float) -> None:
        if self._has_begun:
            self._costs.note(size, tokens, seconds)
        self._has_begun = True


class PrefillRate:
    """Measures what computing costs: a part for each step, and one by a token's position.

    Attention makes later tokens dearer. Steps of a few tokens tell the fixed part.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._costs = CostTable(clock, stale_s=math.inf)
        self._step_s = 0.0
        self._step_tokens = 1  # of the largest step

    def note_step(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Takes up a step that computed the tokens start..stop of some prompts in this time."""
        if not chunks:
            return
        chunks = [chunk for chunk in chunks if chunk[1] - chunk[0] >= _FEWEST_TOKENS]
        total = sum(stop - start for start, stop in chunks)
        if not chunks:
            self._step_s += (seconds - self._step_s) * (1 - _KEEP if self._step_s else 1.0)
            return
        self._step_tokens = max(self._step_tokens, total)
        per_token = max(0.1 * seconds, seconds - self._step_s) / total
        for start, stop in chunks:
            for first, last in _pieces(start, stop):
                self._costs.note(first, last - first, per_token * (last - first))

    @property
    def step_s(self) -> float:
        """Seconds of a step that computes next to nothing; 0 if there was none yet."""
        return self._step_s

    def is_known(self, start: int, stop: int) -> bool:
        """True if all these positions have been measured: an estimate guesses none of them."""
        return all(
            self._costs.is_known(first, last - first) for first, last in _pieces(start, stop)
        )

    def seconds(self, start: int, stop: int) -> float | None:
        """Returns the time for the tokens start..stop of a prompt; None if it is not known."""
        beside_s = self.seconds_beside(start, stop)
        if beside_s is None:
            return None
        return beside_s + self._step_s * math.ceil((stop - start) / self._step_tokens)

    def seconds_beside(self, start: int, stop: int) -> float | None:
        """Returns what these tokens add to steps that are made anyway; None if not known."""
        total = 0.0
        for first, last in _pieces(start, stop):
            cost = self._costs.per_token(first)
            if cost is None:
                return None
            total += cost * (last - first)
        return total


def _class_of(size: float) -> int:
    return max(_FEW_TOKENS, math.floor(math.log2(max(1.0, size))))


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of start..stop that lie in one class of positions each."""
    while start < stop:
        end = min(stop, 2 << _class_of(start))
        yield start, end
        start = end
