"""PageWait: decides, within bounds, for which pages that P still stores D waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pdstore.adapters.sglang.page_arrivals import PageArrivals, is_short
from pdstore.format.keys import PromptKeys
from pdstore.metrics import Metrics
from pdstore.settings import LOOKUP_WAIT_S, Settings
from pdstore.store.base import Store


class PageWait:
    """Waits until a prompt's pages are stored, or until the first of those that are missing comes.

    SGLang asks for a prompt's pages once, on one thread for all requests, while P's last pages are
    still on their way. It passes no hand-off that would say whether P stores them at all. A page
    that appears meanwhile says so: P stores a prompt's pages in one go. Then the rest is expected,
    and a load follows it.

    So a wait has three bounds: a time without a new page, the time of a whole wait with its load,
    and a number of waits in a row in which nothing came. After those no prompt is waited for during
    a rest.

    `wait` is for one thread at a time, `arrivals` for one beside it; `close` may come from any.

    settings: PDSTORE_HANDOFF_WAIT_S ends a wait and the load of its batch.
    stall_s: seconds without a new page that end a wait or a load.
    batch_pages: the most that SGLang asks for at once. Expected pages that are so many have
      probably more of their prompt behind them, in the next batch.
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
        stall_s: float = LOOKUP_WAIT_S,
        batch_pages: int = 128,
        most_vain: int = 3,
        rest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrivals = PageArrivals(store, stall_s, clock=clock)
        self._total_s = settings.handoff_wait_s
        self._metrics, self._clock = metrics, clock
        self._batch_pages = batch_pages
        self._most_vain, self._rest_s = most_vain, rest_s
        self._num_vain = 0
        self._rest_until = self._clock()
        self._before: list[bytes] = []  # the batch that was expected last, if it was a full one
        self._expected: dict[bytes, float] = {}  # until when, by a batch's first page

    def wait(self, keys: PromptKeys) -> bool:
        """Waits for the pages of a batch. True if they are expected, though not all are stored.

        False when all are stored, when none comes, or when the store errs.
        keys: of at least one page.
        """
        before, self._before = self._before, []
        began, found = self._clock(), self._arrivals.look(keys)
        is_expected = False
        if found.reason is None:
            self._note(came=True)
        elif is_short(found) and began >= self._rest_until:
            is_expected = self._follow(before, keys, len(found.keys), began + self._total_s)
            self._metrics.handoff_wait_seconds.observe(self._clock() - began)
        return is_expected

    def arrivals(self, keys: PromptKeys) -> Iterator[int] | None:
        """Returns what yields how many of the first pages are stored, whenever that is more.

        None if the pages are not expected.
        keys: a batch that `wait` was given, or its first pages.
        """
        until = self._expected.get(keys.hash_of(0), 0.0)
        return self._arrivals.follow(keys, 0, until) if until > self._clock() else None

    def close(self) -> None:
        """Ends what is under way. Twice is fine."""
        self._arrivals.close()

    def _follow(self, before: list[bytes], keys: PromptKeys, num_found: int, until: float) -> bool:
        """Looks until a page of the batch comes; True if more of them are expected.

        before: pages that are expected already, and stored before those of the batch.
        """
        names = [keys.hash_of(n) for n in range(len(keys))]
        if not set(before).isdisjoint(names):
            before = []  # another request's
        both = PromptKeys.named(keys.namespace, [*before, *names])
        num_known, num_stored = len(before) + num_found, 0
        for num_stored in self._arrivals.follow(both, 0 if before else num_found, until):
            if num_stored > num_known:
                break
        self._note(came=num_stored > num_known)
        if not num_known < num_stored < len(both):
            return False
        self._before = names if len(names) >= self._batch_pages else []
        now = self._clock()
        self._expected = {name: end for name, end in self._expected.items() if end > now}
        self._expected[names[0]] = until
        return True

    def _note(self, *, came: bool) -> None:
        """Counts the waits in vain, and begins or ends the rest."""
        self._num_vain = 0 if came else self._num_vain + 1
        rest_s = self._rest_s if self._num_vain >= self._most_vain else 0.0
        self._rest_until = self._clock() + rest_s
