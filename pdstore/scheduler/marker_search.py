"""MarkerSearch: looks for the markers of all waiting hand-offs at once."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import FindsKeys, find_optional


class MarkerSearch:
    """Finds stored keys among many, in one call where the store can (`FindsKeys`).

    Any other store is asked key by key, `most_calls` of them a time, each in its turn.
    """

    def __init__(self, store: Store, most_calls: int = 8) -> None:
        self._store, self._most_calls = store, most_calls
        self._finder = find_optional(store, FindsKeys)
        self._next = 0
        self.looked_for: Sequence[BlockKey] = ()  # by the last search

    def num_calls(self, num_keys: int) -> int:
        """Returns how many calls of the store a search for so many keys is."""
        return min(num_keys, 1 if self._finder else self._most_calls)

    def is_whole(self, num_keys: int) -> bool:
        """Returns whether one search among so many keys looks for all of them."""
        return self._finder is not None or num_keys <= self._most_calls

    def stored(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns those of the keys that were found; the rest is missing or was not looked for.

        Raises StoreError.
        """
        self.looked_for = keys
        if not keys:
            return set()
        if self._finder is not None:
            return stored_among(self._finder.which_stored(keys), keys, self._store)
        count = min(len(keys), self._most_calls)
        asked = self.looked_for = [keys[(self._next + i) % len(keys)] for i in range(count)]
        self._next += count
        return {key for key in asked if count_of(self._store.match([key]), [key], self._store)}
