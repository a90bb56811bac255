"""PageArrivals: sees pages appear in the store, as long as more of them come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.keys import PromptKeys
from pdstore.outcome import Reason
from pdstore.scheduler.lookup import Lookup, LookupQueue, Match, find
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.optional import TellsChanges
from pdstore.store.watch import Pace
from pdstore.threads import Latch

_TOLD_LAST_S = 0.05  # between looks at a store that tells: it may not hear of other hosts


class PageArrivals:
    """Looks for pages of one prompt, and follows them while P stores them. Any thread may call it.

    stall_s: pages are followed until none has come for so long; a look takes no longer, either.
    clock: monotonic seconds.
    """

    def __init__(
        self, store: Store, stall_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stall_s, self._clock = stall_s, clock
        self._teller = find_optional(store, TellsChanges)
        self._queue = LookupQueue(partial(find, store), stall_s)
        self._closed = Latch()

    def look(self, keys: PromptKeys) -> Match:
        """Returns the match of the pool as it is now."""
        if self._queue.is_stuck:
            return Match.miss(keys, Reason.STORE_SLOW)
        lookup = Lookup(keys, None, self._stall_s, lambda found: None)
        self._queue.add(lookup)
        return lookup.wait(2 * self._stall_s)  # it ends by itself before that

    def follow(self, keys: PromptKeys, num_found: int, until: float) -> Iterator[int]:
        """Yields how many of the first pages are stored, whenever that is more than before.

        Ends when all are, when no more has come for `stall_s`, at `until`, or when the store errs.
        Looks once even when `until` is over. The caller's time between two numbers does not count.

        num_found: pages that are known to be stored.
        until: a time of the clock.
        """
        pace = self._new_pace()
        seen = self._pause(None, 0.0)
        stall_end = self._clock() + self._stall_s
        while not self._closed.is_set:
            asked_at = time.monotonic()
            found = self.look(keys)
            pause_s = pace.after(1, time.monotonic() - asked_at)
            if len(found.keys) > num_found:
                num_found = len(found.keys)
                yield num_found
                stall_end = self._clock() + self._stall_s
                pace.hurry()
            left_s = min(until, stall_end) - self._clock()
            if not is_short(found) or left_s <= 0:
                return
            if self._teller is not None:
                self._closed.wait(min(left_s, pace.blocked_s()))
            seen = self._pause(seen, min(left_s, pause_s))

    def close(self) -> None:
        """Ends what is under way. Twice is fine."""
        self._closed.set()
        self._queue.close()

    def _new_pace(self) -> Pace:
        is_told = self._teller is not None
        return Pace(last_s=_TOLD_LAST_S, calls_per_s=None, share=2) if is_told else Pace()

    def _pause(self, seen: int | None, pause_s: float) -> int | None:
        """Pauses; less where the store tells that something was stored. Returns its number."""
        if self._teller is not None:
            with contextlib.suppress(StoreError):  # the next look meets it, too
                return self._teller.wait_for_change(seen, pause_s)
        self._closed.wait(pause_s)
        return None


def is_short(found: Match) -> bool:
    """True if pages are missing that may still come."""
    return found.reason is Reason.ABSENT
