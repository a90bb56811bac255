"""Whereabouts: remembers in which lower tier each value was found last."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdstore.format.keys import BlockKey

_MOST_KEYS = 1 << 17
"""Keys that are remembered, each in about 250 bytes: more than all waiting requests have found."""


class Whereabouts:
    """Remembers which keys were found below the first tier, and in which tier. Does no I/O.

    A key that it does not know was found in the first tier, or nowhere. Beyond `most_keys` it
    forgets those that were found longest ago. Any thread may call it.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._below: dict[BlockKey, int] = {}

    def note(self, number: int, keys: Sequence[BlockKey]) -> None:
        """Notes that keys were found in the tier of a number, or are stored in it since now."""
        if number == 0:
            self.forget(keys)
            return
        with self._lock:
            for key in keys:
                self._below.pop(key, None)  # so that the dict keeps the order of the last finds
                self._below[key] = number
            while len(self._below) > self._most_keys:
                del self._below[next(iter(self._below))]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Forgets where keys were found."""
        if self._below:
            with self._lock:
                for key in keys:
                    self._below.pop(key, None)

    def which_tier(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier where it was found last; 0 if not known."""
        below = self._below
        return [below.get(key, 0) for key in keys] if below else [0] * len(keys)
