"""Renewals: looks up again what waiting requests have found, so that it is there when they run."""

# Decision: docs/decisions/045-renewed-lookups.md
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from pdstore.errors import Reason
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.store.base import P, Store
from pdstore.store.optional import FindsAgain, FindsKeys, TellsTiers
from pdstore.store.wrappers import WrapperStore
from pdstore.threads import Ticker, call_or

MAX_AGE_S = 3.0
"""How old an answer may get, because others save meanwhile; if less, a third of the lease."""
_PART_OF_AGE = 0.75  # an answer is renewed at this part of its age, because its turn may come late
_MAX_DUTY = 0.25  # the part of the time that renewals may take
_MAX_IDLE_S = 0.5  # the longest pause after a slow call
_YIELD_S = 0.01  # after so long a renewal that waits for new lookups looks again


class _FoundAgain(WrapperStore):
    """A store of tiers whose matches ask a lower tier only for what was found there.

    lease_s: of the tier with the shortest lease. A tier that gives none has no part in it, because
      nothing is kept there by asking more often.
    """

    passes = (TellsTiers,)

    def __init__(self, store: Store, again: FindsAgain) -> None:
        super().__init__(store)
        self._again = again

    @property
    def lease_s(self) -> float:
        return self._again.shortest_lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self._again.match_again(keys)

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._again.which_again(keys)

    def optional(self, protocol: type[P]) -> P | None:
        if protocol is FindsKeys and self.wrapped.optional(FindsKeys) is not None:
            return cast(P, self)
        return super().optional(protocol)


def store_for_renewals(store: Store) -> Store:
    """Returns the store by whose matches answers are renewed: without new looks at lower tiers."""
    again = store.optional(FindsAgain)
    return _FoundAgain(store, again) if again is not None else store


class Renewals:
    """Renews the answers of lookups that are held, on a thread of its own.

    The thread takes the lookup that arrived first of those that are due, since an engine serves its
    queue in that order. While a new lookup waits, it renews only answers that are as old as they
    may get. A call that hangs holds up other renewals, and nothing else. If the store fails, the
    lookup keeps the answer that it has.

    Any thread may call `add`. A lookup that is over is forgotten at the thread's next turn.

    store: has the leases; of several tiers, as `store_for_renewals` returns it.
    find: returns a match; its second argument is the reason why the pool may have only a part of
      the prompt, or None.
    must_yield: returns whether new lookups wait for the store.
    """

    def __init__(
        self,
        store: Store,
        find: Callable[[PromptKeys, Reason | None], Match],
        must_yield: Callable[[], bool],
    ) -> None:
        self._store = store
        self._find = find
        self._must_yield = must_yield
        self._lock = threading.Lock()
        self._due: dict[Lookup, float] = {}  # when each is renewed next
        self._idle_until = 0.0
        self._is_closed = False
        self._thread = Ticker("pdstore-renewals", self._turn)

    def add(self, lookup: Lookup) -> None:
        """Renews a lookup that has just been answered, from now on until it is over."""
        if lookup.is_over or not lookup.found.may_change:
            return
        with self._lock:
            if self._is_closed:
                return
            self._due[lookup] = time.monotonic() + self.interval_s
            is_first = len(self._due) == 1  # else the thread wakes before this one is due
        if is_first:
            self._thread.wake()

    def __len__(self) -> int:
        """The number of lookups that are renewed, and of those that ended a moment ago."""
        return len(self._due)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread and forgets all lookups; each keeps its answer."""
        with self._lock:
            self._is_closed = True
            self._due.clear()
        self._thread.stop(timeout_s)

    @property
    def interval_s(self) -> float:
        """Seconds from an answer to its renewal: less than the answer may be old."""
        lease_s = self._store.lease_s
        return _PART_OF_AGE * (min(lease_s / 3, MAX_AGE_S) if lease_s else MAX_AGE_S)

    def _turn(self) -> float | None:
        """Renews one lookup that is due; returns the seconds to the next turn."""
        began = time.monotonic()
        overdue_s = self.interval_s * (1 / _PART_OF_AGE - 1) if self._must_yield() else 0.0
        with self._lock:
            for lookup in [each for each in self._due if each.is_over]:
                del self._due[lookup]
            if not self._due:
                return None
            next_at = max(min(self._due.values()), self._idle_until)
            due = [lookup for lookup, at in self._due.items() if at <= began - overdue_s]
        if next_at > began:
            return next_at - began
        if not due:
            return _YIELD_S
        lookup = min(due, key=lambda each: each.started_at)
        has_run = call_or(partial(self._renew, lookup), False)  # else there is a defect
        ended = time.monotonic()
        self._idle_until = ended + min((ended - began) * (1 / _MAX_DUTY - 1), _MAX_IDLE_S)
        with self._lock:
            if has_run and lookup in self._due:
                self._due[lookup] = ended + self.interval_s
            else:
                self._due.pop(lookup, None)
        return self._idle_until - ended

    def _renew(self, lookup: Lookup) -> bool:
        """Asks the store again, which leases what it has; returns True.

        What P has stored of a hand-off is leased too; its answer stays that all of it comes.
        """
        before = lookup.found
        keys = lookup.keys if before.follow is None else before.keys
        found = self._find(keys, lookup.because)
        is_partial = before.follow is not None and found.num_tokens < before.num_tokens
        if found.error is None and not is_partial:
            lookup.renew_answer(found)
        return True
