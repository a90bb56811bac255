"""TierSearch: finds and leases keys in one tier of several, or in a tier and those below it."""

# Decision: docs/decisions/047-meeting-tier.md
from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import FindsKeys
from pdstore.store.tiers.found import Whereabouts, is_for_all_tiers
from pdstore.store.tiers.lower import LowerTier


class TierSearch:
    """Searches tiers, and notes where it finds each key.

    A search of a lower tier has the tier's budget. If the tier is out, it has nothing.
    """

    def __init__(self, first: Store, lower: Sequence[LowerTier], found: Whereabouts) -> None:
        self._tiers = [first, *(tier.store for tier in lower)]
        self._lower = lower
        self._found = found
        self._finders = [store.optional(FindsKeys) for store in self._tiers]

    def match(self, number: int, keys: Sequence[BlockKey]) -> int:
        """Matches leading keys in the tier with this number and in those below it.

        One search finds the leading keys that this tier has. Of the others, a second search finds
        which it has, and the next tier is asked for the rest, all in one call.
        """
        found = self.match_in(number, keys)
        if found == len(keys) or number == len(self._lower) or not is_for_all_tiers(keys[found]):
            return found
        rest = keys[found:]
        has = self.which_leading(number, rest)
        below = [i for i, is_here in enumerate(has) if not is_here]
        num_below = self.match(number + 1, [rest[i] for i in below])
        end = below[num_below] if num_below < len(below) else len(has)
        here = [i for i in range(end) if has[i]]
        leased = self.match_in(number, [rest[i] for i in here]) if here else 0
        return found + (here[leased] if leased < len(here) else end)

    def which_leading(self, number: int, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns which keys a tier has, up to the first that it lacks and that no other may have.

        The tiers below may keep tails of the time when one of them was a pool by itself.
        """
        has = [*self.which_in(number, keys)]
        ends = (i for i, key in enumerate(keys) if not (has[i] or is_for_all_tiers(key)))
        return has[: next(ends, len(keys))]

    def match_in(self, number: int, keys: Sequence[BlockKey]) -> int:
        """Matches leading keys in the tier with this number; returns how many it has."""
        store = self._tiers[number]

        def match() -> int:
            return count_of(store.match(keys), keys, store)

        found = self._lower[number - 1].look(match, 0) if number else match()
        self._found.note(number, keys[:found])
        return found

    def which_in(self, number: int, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Returns which keys the tier with this number has; none, if it cannot tell or is out."""
        finder = self._finders[number]
        none: set[BlockKey] = set()
        if finder is None:
            return [False] * len(keys)

        def search() -> set[BlockKey]:
            return stored_among(finder.which_stored(keys), keys, self._tiers[number])

        stored = self._lower[number - 1].look(search, none) if number else search()
        return [key in stored for key in keys]
