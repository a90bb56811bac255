"""HandoffProgress: how far P is with a prompt that it still computes, as D sees it in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.namespace import Part
from pdstore.metrics import Metrics
from pdstore.scheduler.rates import PrefillRate

_PIECES = 4  # of a prompt; D looks for the end of each
_MARGIN = 1.25  # on the load, since a client waits for a D that begins late
_LATE_S = 0.05  # `started` comes late in a short prompt, and then a look and a step of D's engine
_PATIENCE_S = 60.0


class HandoffProgress:
    """Tells when D should take engine blocks for a hand-off that P has begun to compute.

    That is when what P still computes takes no longer than the load: earlier, D's blocks would only
    wait. A piece of the prompt counts as computed when the last layer range of its last block is
    stored; between two pieces the estimate counts down. D begins at once if either time is not
    known, and at the latest when the first layer range of the last block is stored.

    pace: the cost of P's prefill, as all hand-offs have shown so far; `note` adds to it.
    load_s: seconds that the load will take; None if that is not known.
    For one thread.
    """

    def __init__(
        self,
        keys: PromptKeys,
        pace: PrefillRate,
        load_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._pace, self._clock = keys, pace, clock
        self.load_s = load_s
        namespace = keys.namespace
        parts = [part for part in namespace.parts if part.group not in namespace.windows]
        last = len(keys) - 1
        self._ends: dict[BlockKey, int] = {}  # by key, the tokens that are computed by then
        self._last: BlockKey | None = None
        if parts and last >= 0:
            blocks = sorted({(last * n) // _PIECES for n in range(1, _PIECES + 1)})
            self._ends = {self._key(parts[-1:], at): keys.end_of(at + 1) for at in blocks}
            self._last = self._key(parts[:1], last)
        self._unseen = set(self._ends)  # not looked for yet
        self._is_ending = False
        self._computed, self._at = 0, clock()

    @property
    def is_over(self) -> bool:
        """True when there is nothing more to look for."""
        return not self._ends or self._clock() - self._at > _PATIENCE_S

    def wanted(self) -> list[BlockKey]:
        """Returns the keys to look for next."""
        last = [] if self._last is None or self._last in self._ends else [self._last]
        return [*self._ends, *last]

    def note(
        self, stored: AbstractSet[BlockKey], looked_for: AbstractSet[BlockKey] = frozenset()
    ) -> None:
        """Takes note of keys that are stored. What was stored before tells no pace.

        So that is learned from what comes when all of `wanted` has been looked for.
        """
        self._is_ending |= self._last in stored
        has_looked = not self._unseen
        ends = [tokens for key, tokens in self._ends.items() if key in stored]
        if ends:
            computed, now = max(ends), self._clock()
            if has_looked:
                if computed - self._computed >= self._keys.block_tokens:
                    self._pace.note_step([(self._computed, computed)], now - self._at)
                self._at = now
            self._computed = computed
            self._ends = {key: end for key, end in self._ends.items() if end > computed}
        self._unseen = {k for k in self._unseen if k in self._ends and k not in looked_for}

    def remaining_s(self) -> float | None:
        """Returns the seconds that P still computes; None if that is not known."""
        start, stop = self._computed, self._keys.num_tokens
        if not self._pace.is_known(start, stop):
            return None
        seconds = self._pace.seconds(start, stop)
        return None if seconds is None else seconds - (self._clock() - self._at)

    def why_begin(self) -> str | None:
        """Returns why D should begin now: `unknown`, `estimate` or `last_block`; None to wait."""
        if self._is_ending:
            return "last_block"
        remaining_s = self.remaining_s()
        if remaining_s is None or self.load_s is None:
            return "unknown"
        return "estimate" if remaining_s <= _MARGIN * self.load_s + _LATE_S else None

    def count(self, metrics: Metrics, because: str) -> None:
        """Counts a load that begins now, and both estimates."""
        metrics.follows.labels(because).inc()
        for what, seconds in (("compute", self.remaining_s()), ("load", self.load_s)):
            if seconds is not None:
                metrics.follow_estimate_seconds.labels(what).observe(max(0.0, seconds))

    def _key(self, parts: Sequence[Part], block: int) -> BlockKey:
        return self._keys.store_keys(parts, block, block + 1)[0]
