"""PageWait: waits, within bounds, for the pages of a prompt that P is still storing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.keys import PromptKeys
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.lookup_queue import LookupQueue
from pdstore.scheduler.matching import find
from pdstore.scheduler.pace import Pace
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.optional import TellsChanges
from pdstore.threads import Latch

_TOLD_LAST_S = 0.05  # between looks at a store that tells: it may not hear of other hosts


class PageWait:
    """Waits until the pages of a prompt are stored, as long as more of them appear.

    SGLang asks for a prompt's pages once, on one thread for all requests, while P's last pages are
    still on their way. It passes no hand-off that would say whether P stores them at all, so a wait
    has three bounds: a time without a new page, the time of a whole wait, and a number of waits in
    a row in which nothing came. After those no prompt is waited for during a rest.

    For one thread at a time; `close` may come from another one.

    settings: PDSTORE_LOOKUP_WAIT_S without a new page ends a wait, and so does
      PDSTORE_HANDOFF_WAIT_S in all.
    most_vain: waits in a row without any page, before the rest.
    rest_s: seconds of the rest, which a prompt that is stored whole ends early.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        *,
        most_vain: int = 3,
        rest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_s, self._total_s = settings.lookup_wait_s, settings.handoff_wait_s
        self._metrics, self._clock = metrics, clock
        self._most_vain, self._rest_s = most_vain, rest_s
        self._teller = find_optional(store, TellsChanges)
        is_told = self._teller is not None
        self._pace = Pace(last_s=_TOLD_LAST_S, calls_per_s=None, share=2) if is_told else Pace()
        self._queue = LookupQueue(partial(find, store), self._stall_s)
        self._num_vain = 0
        self._rest_until = self._clock()
        self._closed = Latch()

    def wait(self, keys: PromptKeys) -> None:
        """Returns when all pages are stored, when no more come, or when the store errs.

        keys: of at least one page.
        """
        began, found = self._clock(), self._look(keys)
        if found.reason is None:
            self._note(came=True)
        elif _is_short(found) and began >= self._rest_until:
            came = self._follow(keys, len(found.keys))
            self._metrics.handoff_wait_seconds.observe(self._clock() - began)
            self._note(came=came)

    def close(self) -> None:
        """Ends a wait. Twice is fine."""
        self._closed.set()
        self._queue.close()

    def _note(self, *, came: bool) -> None:
        """Counts the waits in vain, and begins or ends the rest."""
        self._num_vain = 0 if came else self._num_vain + 1
        rest_s = self._rest_s if self._num_vain >= self._most_vain else 0.0
        self._rest_until = self._clock() + rest_s

    def _follow(self, keys: PromptKeys, num_found: int) -> bool:
        """Looks until one of the bounds; True if any page came."""
        first, pause_s = num_found, 0.0
        seen: int | None = None
        end = self._clock() + self._total_s
        stall_end = self._clock() + self._stall_s
        while (left_s := min(end, stall_end) - self._clock()) > 0 and not self._closed.is_set:
            seen = self._pause(seen, min(left_s, pause_s))
            asked_at = time.monotonic()
            found = self._look(keys)
            pause_s = self._pace.after(1, time.monotonic() - asked_at)
            if len(found.keys) > num_found:
                num_found, stall_end = len(found.keys), self._clock() + self._stall_s
                self._pace.hurry()
            if not _is_short(found):
                break
        return num_found > first

    def _pause(self, seen: int | None, pause_s: float) -> int | None:
        """Pauses; less where the store tells that something was stored. Returns its number."""
        self._closed.wait(self._pace.blocked_s())
        if self._teller is not None:
            with contextlib.suppress(StoreError):  # the next look meets it, too
                return self._teller.wait_for_change(seen, pause_s)
        self._closed.wait(pause_s)
        return None

    def _look(self, keys: PromptKeys) -> Match:
        """Returns the match of the pool as it is now, within a lookup's time."""
        if self._queue.is_stuck:
            return Match.miss(keys, Reason.STORE_SLOW)
        lookup = Lookup(keys, None, self._stall_s, lambda found: None)
        self._queue.add(lookup)
        return lookup.wait(2 * self._stall_s)  # it ends by itself before that


def _is_short(found: Match) -> bool:
    """True if pages are missing that may still come."""
    return found.reason is Reason.ABSENT
