"""What a store may offer beyond the contract: protocols, asked for by isinstance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pdstore.format.keys import BlockKey


@runtime_checkable
class FindsKeys(Protocol):
    """A store that can look for many unrelated keys in one round trip.

    One call then asks for the markers of all the hand-offs that an instance waits for.
    """

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether it is stored, hits and misses in any order.

        Leases nothing, and does not count as a use. The keys are distinct, as in every call.
        Raises StoreError.
        """


@runtime_checkable
class TellsChanges(Protocol):
    """A store that can say when somebody, in any process, has stored something."""

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Blocks until something may have been stored since `seen`, at most for `timeout_s`.

        seen: the number that an earlier call returned; None asks for the present number and
          returns at once.
        Returns the present number: equal to `seen` if the time was up, another one if not. It may
        change without need, but never stays the same across a completed put: whoever takes the
        number first and then looks for a key misses no put. From any thread. Raises StoreError.
        """
