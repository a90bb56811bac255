"""ChunkFinder: finds which of some unrelated keys are stored."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.store.checked import count_of, stored_among
from pdstore.store.find import find_optional
from pdstore.store.optional import FindsKeys


class ChunkFinder:
    """Finds stored keys behind gaps too. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._which = find_optional(store, FindsKeys)

    def find(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns the keys that are stored, and leases those. Raises StoreError.

        One call of the store if all are there, and two or three otherwise; a store that cannot
        look for unrelated keys is called once for each gap.
        """
        found: set[BlockKey] = set()
        rest = keys
        while rest:
            count = count_of(self._store.match(rest), rest, self._store)
            found.update(rest[:count])
            rest = rest[count + 1 :]
            if rest and self._which is not None:
                stored = stored_among(self._which.which_stored(rest), rest, self._store)
                rest = [key for key in rest if key in stored]
        return found
