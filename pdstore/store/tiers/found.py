"""Whereabouts: remembers in which lower tier each value was found last, and which went up since."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdstore.format.keys import BlockKey, Kind, kind_of

_MOST_KEYS = 1 << 17
"""Keys that are remembered, each in about 250 bytes: more than all waiting requests have found."""


class Whereabouts:
    """Remembers which keys were found below the first tier, and in which tier. Does no I/O.

    A key that it does not know was found in the first tier, or nowhere. Of a key that this process
    has promoted it remembers from where. Beyond `most_keys` it forgets those that were found, or
    promoted, longest ago. Any thread may call it.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._below: dict[BlockKey, int] = {}
        self._promoted: dict[BlockKey, int] = {}
        self._num_forgotten = 0

    @property
    def num_forgotten(self) -> int:
        """The number of calls of `forget` so far; a search reads it before it begins."""
        return self._num_forgotten

    def note(self, number: int, keys: Sequence[BlockKey], since: int | None = None) -> None:
        """Notes that keys were found in the tier with this number, or are stored in it since now.

        since: `num_forgotten` before the search. If keys were forgotten since then, it notes
          nothing, since what the search has found may be removed by now.
        """
        if not (number or self._below):
            return
        with self._lock:
            if since is not None and since != self._num_forgotten:
                return
            for key in keys:
                self._below.pop(key, None)  # so that the dict keeps the order of the last finds
                if number:
                    self._below[key] = number
                    self._promoted.pop(key, None)
            _shorten(self._below, self._most_keys)

    def note_promoted(self, keys: Sequence[BlockKey]) -> None:
        """Notes that keys, which were found below, are in the first tier since now."""
        with self._lock:
            for key in keys:
                number = self._below.pop(key, 0)
                if number:
                    self._promoted.pop(key, None)
                    self._promoted[key] = number
            _shorten(self._promoted, self._most_keys)

    def forget(self, is_forgotten: Callable[[BlockKey], bool]) -> None:
        """Forgets keys that are removed from all tiers."""
        with self._lock:
            self._num_forgotten += 1
            for known in (self._below, self._promoted):
                for key in list(filter(is_forgotten, known)):
                    del known[key]

    def which_tier(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier where it was found last; 0 if not known."""
        below = self._below
        return [below.get(key, 0) for key in keys] if below else [0] * len(keys)

    def promoted_from(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier from which this process promoted it last.

        0 is the answer for a key that it has not promoted, or has found below again since.
        """
        promoted = self._promoted
        return [promoted.get(key, 0) for key in keys]


def _shorten(known: dict[BlockKey, int], most_keys: int) -> None:
    while len(known) > most_keys:
        del known[next(iter(known))]


def is_for_all_tiers(key: BlockKey) -> bool:
    """True for a block; tails, markers, beats and the pool's id are in the first tier alone.

    Purge numbers are in every tier, but no copier copies them.
    """
    return kind_of(key) is Kind.BLOCK
