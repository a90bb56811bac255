"""PageWait: waits, within bounds, for pages of a prompt that P still stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pdstore.errors import Reason
from pdstore.format.keys import PromptKeys
from pdstore.metrics import Metrics
from pdstore.scheduler.lookup import Lookup, LookupQueue, Match, find
from pdstore.settings import LOOKUP_WAIT_S, Settings
from pdstore.store.base import Store
from pdstore.store.watch import Pace


@dataclass(eq=False)
class PageWait:
    """Waits until a prompt's pages are stored, or until the first of those that are missing comes.

    SGLang asks for a prompt's pages once, on one thread for all requests, while P's last pages are
    still on their way. It passes no hand-off that would say whether P stores them at all. A page
    that appears meanwhile says so: P stores a prompt's pages in one go. Then the rest is expected,
    and a load follows it.

    So a wait has three bounds: a time without a new page, the time of a whole wait with its load,
    and a number of waits in a row in which nothing came. After those no prompt is waited for during
    a rest.

    `wait_for_pages` is for one thread at a time, `arrivals` for one beside it; `close` may come
    from any.

    settings: PDSTORE_HANDOFF_WAIT_S ends a wait and the load of its batch.
    stall_s: seconds without a new page that end a wait or a load.
    batch_pages: the most that SGLang asks for at once. Expected pages that are so many have
      probably more of their prompt behind them, in the next batch.
    most_vain: waits in a row without any page, before the rest.
    rest_s: seconds of the rest, which a prompt that is stored whole ends early.
    clock: monotonic seconds.
    """

    settings: Settings
    store: Store
    metrics: Metrics
    stall_s: float = LOOKUP_WAIT_S
    batch_pages: int = 128
    most_vain: int = 3
    rest_s: float = 5.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._num_vain = 0
        self._rest_until = self.clock()
        self._before: list[bytes] = []  # the batch that was expected last, if it was a full one
        self._expected: dict[bytes, float] = {}  # until when, by a batch's first page
        self._queue = LookupQueue(partial(find, self.store), self.stall_s)
        self._closed = threading.Event()

    def wait_for_pages(self, keys: PromptKeys) -> bool:
        """Waits for the pages of a batch. True if they are expected, though not all are stored.

        False when all are stored, when none comes, or when the store errs.
        keys: of at least one page.
        """
        before, self._before = self._before, []
        began, found = self.clock(), self._match(keys)
        is_expected = False
        if found.reason is None:
            self._end_wait(came=True)
        elif found.reason is Reason.ABSENT and began >= self._rest_until:
            until = began + self.settings.handoff_wait_s
            is_expected = self._expects(before, keys, len(found.keys), until)
            self.metrics.handoff_wait_seconds.observe(self.clock() - began)
        return is_expected

    def arrivals(self, keys: PromptKeys) -> Iterator[int] | None:
        """Returns what yields how many of the first pages are stored, whenever that is more.

        None if the pages are not expected.
        keys: a batch that `wait_for_pages` was given, or its first pages.
        """
        until = self._expected.get(keys.hash_of(0), 0.0)
        return self._follow(keys, 0, until) if until > self.clock() else None

    def close(self) -> None:
        """Ends what is under way. Twice is fine."""
        self._closed.set()
        self._queue.close()

    def _match(self, keys: PromptKeys) -> Match:
        """Returns the match of the pool as it is now; a store that takes too long has none."""
        if self._queue.is_stuck:
            return Match.miss(keys, Reason.STORE_SLOW)
        lookup = Lookup(keys, None, self.stall_s, lambda found: None)
        self._queue.add(lookup)
        return lookup.wait(2 * self.stall_s)  # it ends by itself before that

    def _follow(self, keys: PromptKeys, num_found: int, until: float) -> Iterator[int]:
        """Yields how many of the first pages are stored, whenever that is more than before.

        Ends when all are, when no more has come for a stall, at `until`, or when the store errs.
        Looks once even when `until` is over. The caller's time between two numbers does not count.
        """
        pace = Pace()
        stall_end = self.clock() + self.stall_s
        while not self._closed.is_set():
            asked_at = time.monotonic()
            found = self._match(keys)
            pause_s = pace.after(time.monotonic() - asked_at)
            if len(found.keys) > num_found:
                num_found = len(found.keys)
                yield num_found
                stall_end = self.clock() + self.stall_s
                pace.hurry()
            left_s = min(until, stall_end) - self.clock()
            if found.reason is not Reason.ABSENT or left_s <= 0:
                return
            self._closed.wait(min(left_s, pause_s))

    def _expects(self, before: list[bytes], keys: PromptKeys, num_found: int, until: float) -> bool:
        """Follows a batch until a page of it comes; True if more of them are expected.

        before: pages that are expected already, and stored before those of the batch.
        """
        names = [keys.hash_of(n) for n in range(len(keys))]
        if not set(before).isdisjoint(names):
            before = []  # another request's
        both = PromptKeys.named(keys.namespace, [*before, *names])
        num_known = len(before) + num_found
        counts = self._follow(both, 0 if before else num_found, until)
        num_stored = next((count for count in counts if count > num_known), 0)
        self._end_wait(came=num_stored > 0)
        if not 0 < num_stored < len(both):
            return False
        self._before = names if len(names) >= self.batch_pages else []
        now = self.clock()
        self._expected = {name: end for name, end in self._expected.items() if end > now}
        self._expected[names[0]] = until
        return True

    def _end_wait(self, *, came: bool) -> None:
        """Counts the waits in vain, and begins or ends the rest."""
        self._num_vain = 0 if came else self._num_vain + 1
        rest_s = self.rest_s if self._num_vain >= self.most_vain else 0.0
        self._rest_until = self.clock() + rest_s
