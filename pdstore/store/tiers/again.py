"""Again: renews the leases of what was found in several tiers, each where it was found."""

# Decision: docs/decisions/045-renewed-lookups.md
from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.store.optional import FindsKeys
from pdstore.store.tiers.found import Whereabouts
from pdstore.store.tiers.search import TierSearch


class Again:
    """FindsAgain: asks a lower tier only for keys that this process has found there last.

    A lower tier is asked once in a call at most, and waited for as long as for any other search. If
    it is out, it has nothing.

    tiers: the stores, the fastest first.
    found: where values were found.
    search: finds and leases keys in one tier.
    """

    def __init__(
        self,
        tiers: Sequence[Store],
        found: Whereabouts,
        search: TierSearch,
    ) -> None:
        self._tiers = tiers
        self._found = found
        self._search = search
        self._can_search = tiers[0].optional(FindsKeys) is not None

    @property
    def shortest_lease_s(self) -> float:
        """Seconds of the shortest lease that a tier gives; 0 if no tier gives any."""
        return min((store.lease_s for store in self._tiers if store.lease_s), default=0.0)

    def match_again(self, keys: Sequence[BlockKey]) -> int:
        """Matches each key in the first tier, or else in the lower tier where it was found last."""
        num_above = self._search.match_in(0, keys)
        rest = keys[num_above:]
        places = self._places_of(rest)
        end = len(places)
        for number in range(len(self._tiers)):
            here = [i for i in range(end) if places[i] == number]
            if here:
                num_found = self._search.match_in(number, [rest[i] for i in here])
                end = here[num_found] if num_found < len(here) else end
        return num_above + end

    def which_again(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key if the first tier has it, or a lower tier had it when asked last."""
        lower = self._found.which_tier(keys)
        above = self._search.which_in(0, keys)
        return [is_above or number > 0 for is_above, number in zip(above, lower, strict=True)]

    def _places_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns the tier of each key up to the first key that is in none.

        keys: the first of them is not in the first tier.
        """
        lower = self._found.which_tier(keys)
        above: Sequence[bool] = [i > 0 and number == 0 for i, number in enumerate(lower)]
        if self._can_search:  # else the match of these tells which of them are there
            above = self._search.which_in(0, keys)
        is_nowhere = (i for i in range(len(keys)) if not above[i] and not lower[i])
        end = next(is_nowhere, len(keys))
        return [0 if above[i] else lower[i] for i in range(end)]
