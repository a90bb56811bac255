"""LookPlan: which of the keys that an instance waits for are looked for next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pdstore.format.keys import BlockKey
from pdstore.store.change_listener import News
from pdstore.store.optional import TellsChanges

_ROUND_S = 0.05  # from one round's begin to the next one's, where other hosts' puts are not heard
_PIECES = 4  # of a round
_LEAST_PIECE = 256
_ROUNDS_PER_THOROUGH = 3


class Round(NamedTuple):
    """All that the looks of a round have found, and when it began, in seconds of the clock."""

    found: set[BlockKey]
    began_at: float


class LookPlan:
    """Chooses the keys of each look; where the store names what changes, it takes few.

    Then what the store names needs no look, and a look is for the keys that `ask` was told. Beside
    that a round goes through all keys, a piece a look, for the puts that the store does not hear
    of. Any other store is asked for all keys each time.

    wanted: returns all keys that are waited for, on request with those that are seldom stored.
    teller: the store, if it tells of changes.
    round_s: between the begins of two rounds, where the store does not hear of all puts.
    `tell` may be called from any thread, the rest is for one.
    """

    def __init__(
        self,
        wanted: Callable[[bool], Sequence[BlockKey]],
        teller: TellsChanges | None,
        *,
        round_s: float = _ROUND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._clock = wanted, clock
        self._names, self._round_s = False, round_s
        self._told: deque[News] = deque()
        self._asked: dict[BlockKey, None] = {}
        self._rest: Sequence[BlockKey] = []  # of the round
        self._piece = _LEAST_PIECE
        self._round: Round | None = None
        self._num_rounds = 0
        self._next_round = clock()

    def tell(self, news: News) -> None:
        """Takes the keys that were stored; None if any may be."""
        self._told.append(news)

    def ask(self, keys: Iterable[BlockKey]) -> None:
        """Makes the next look one for these keys too, whatever the news."""
        if self._names:
            self._asked.update(dict.fromkeys(keys))

    @property
    def is_told(self) -> bool:
        """True if there is news that `named` has not returned."""
        return bool(self._told)

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the next look if there is no news; None if the store names none."""
        if not self._names:
            return None
        is_due = self._asked or self._told or self._rest
        return 0.0 if is_due else max(0.0, self._next_round - self._clock())

    def named(self) -> set[BlockKey]:
        """Returns the keys that the store has named since the last call: they are stored."""
        named: set[BlockKey] = set()
        while self._told:
            news = self._told.popleft()
            if news is None:
                self._next_round = self._clock()  # after the present one, which has begun before
            else:
                named.update(news)
        return named

    def next(self) -> list[BlockKey]:
        """Returns the keys of a look that is made now, each once; they may be none."""
        chosen, self._asked = self._asked, {}
        if not self._rest and (not self._names or self._clock() >= self._next_round):
            self._begin_round()
        piece, self._rest = self._rest[: self._piece], self._rest[self._piece :]
        return list(chosen | dict.fromkeys(piece))

    def note(self, found: set[BlockKey]) -> Round | None:
        """Takes the outcome of a look for `next`; returns the round that ends with it, if any."""
        if self._round is not None:
            self._round.found.update(found)
        if self._rest:
            return None
        ended, self._round = self._round, None
        return ended

    def _begin_round(self) -> None:
        self._num_rounds += 1
        self._rest = self._wanted(self._num_rounds % _ROUNDS_PER_THOROUGH == 0)
        self._piece = len(self._rest)
        if self._names:
            self._piece = max(_LEAST_PIECE, -(-len(self._rest) // _PIECES))
        self._round = Round(set(), self._clock())
        self._next_round = self._round.began_at + self._round_s
