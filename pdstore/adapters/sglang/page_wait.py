"""PageWait: waits, up to a timeout, for pages of a prompt that P is still storing."""

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
from pdstore.scheduler.renewal import store_for_renewals
from pdstore.settings import LOOKUP_TIMEOUT_S, Settings
from pdstore.store.base import Store
from pdstore.store.watch import Backoff


@dataclass(eq=False)
class PageWait:
    """Waits until the first page that was missing from a batch of a prompt's pages is stored.

    SGLang asks for each page of a prompt only once, on one thread for all requests, and passes no
    hand-off. But P stores all pages of a prompt one after another: a page that appears during the
    wait shows that P will store the others. These are called expected, and a load waits for them.

    A wait has a timeout without a new page, and one together with the load after it. If several
    successive waits bring no page, pdstore waits for no prompt until an interval is over.

    One thread may call `wait_for_pages`, and one more `page_counts`; any thread may call `close`.

    settings: PDSTORE_HANDOFF_WAIT_S is the timeout of a wait together with the load after it.
    page_timeout_s: after so many seconds without a new page, a wait or a load ends.
    batch_pages: most pages that SGLang asks for at once; behind so many it probably asks for more.
    max_empty_waits: after so many successive waits without a new page, `retry_interval_s` begins.
    retry_interval_s: the seconds without waits; a batch whose pages are all stored ends them early.
    clock: returns monotonic seconds.
    """

    settings: Settings
    store: Store
    metrics: Metrics
    page_timeout_s: float = LOOKUP_TIMEOUT_S
    batch_pages: int = 128
    max_empty_waits: int = 3
    retry_interval_s: float = 5.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._num_empty_waits = 0
        self._retry_at = self.clock()
        self._before: list[bytes] = []  # hashes of the last expected batch, if it was full
        self._expected: dict[bytes, float] = {}  # by a batch's first page: the deadline
        self._queue = LookupQueue(partial(find, self.store), self.page_timeout_s)
        self._again = self._queue  # for pages that come now: of several tiers, into the first
        again = store_for_renewals(self.store)
        if again is not self.store:
            self._again = LookupQueue(partial(find, again), self.page_timeout_s)
        self._closed = threading.Event()

    def wait_for_pages(self, keys: PromptKeys, *, is_whole: bool = False) -> bool:
        """Waits for the pages of a batch. Returns True if some are still missing, but expected.

        Returns False if all pages are stored, if no page comes, or if the store fails.
        keys: the keys of at least one page.
        is_whole: True if they are all of a prompt, which SGLang then loads batch by batch; False if
          they are a batch of `batch_pages` at most.
        """
        before = [] if is_whole else self._before
        self._before = []
        began = self.clock()
        found = self._match(keys, self._queue)
        if found.reason is None:
            self._end_wait(came=True)
        if found.reason is not Reason.ABSENT or began < self._retry_at:
            return False
        until = began + self.settings.handoff_wait_s
        is_expected = self._comes(before, keys, len(found.keys), until)
        if is_expected:
            self._expect(keys.hashes(), until, is_whole=is_whole)
        self.metrics.handoff_wait_seconds.observe(self.clock() - began)
        return is_expected

    def page_counts(self, keys: PromptKeys) -> Iterator[int] | None:
        """Returns an iterator that yields, each time it grows, the number of leading stored pages.

        Returns None if the pages are not expected.
        keys: a batch that `wait_for_pages` was given, or its first pages; of a whole prompt, a
          batch that begins after a multiple of `batch_pages`.
        """
        until = self._expected.get(keys.hash_of(0), 0.0)
        return self._counts(keys, 0, until) if until > self.clock() else None

    def close(self) -> None:
        """Ends running waits. A second call does nothing."""
        self._closed.set()
        self._queue.close()
        self._again.close()

    def _match(self, keys: PromptKeys, queue: LookupQueue) -> Match:
        """Matches the pages that are stored now. A store that takes too long counts as a miss."""
        if queue.is_stuck:
            return Match.miss(keys, Reason.STORE_SLOW)
        lookup = Lookup(keys, None, self.page_timeout_s, lambda found: None)
        queue.add(lookup)
        return lookup.wait(2 * self.page_timeout_s)  # the lookup ends sooner, at its own deadline

    def _counts(self, keys: PromptKeys, num_found: int, until: float) -> Iterator[int]:
        """Yields the number of leading pages that are stored, each time that it has grown.

        Ends when all pages are stored, when no new page has appeared for `page_timeout_s`, when the
        time is `until`, or when the store fails. Asks the store once even if `until` has passed.
        Time that the caller spends between two yields does not count towards `page_timeout_s`.
        """
        backoff = Backoff()
        page_deadline = self.clock() + self.page_timeout_s
        while not self._closed.is_set():
            asked_at = time.monotonic()
            found = self._match(keys, self._again)
            interval_s = backoff.next_interval_s(time.monotonic() - asked_at)
            if len(found.keys) > num_found:
                num_found = len(found.keys)
                yield num_found
                page_deadline = self.clock() + self.page_timeout_s
                backoff.restart()
            left_s = min(until, page_deadline) - self.clock()
            if found.reason is not Reason.ABSENT or left_s <= 0:
                return
            self._closed.wait(min(left_s, interval_s))

    def _comes(self, before: list[bytes], keys: PromptKeys, num_found: int, until: float) -> bool:
        """Waits until P stores a missing page of a batch; True if more pages of it will come.

        before: hashes of the previous batch, whose pages P stores before the pages of this batch.
        """
        names = keys.hashes()
        if not set(before).isdisjoint(names):
            before = []  # this is another request
        both = PromptKeys.named(keys.namespace, [*before, *names])
        num_known = len(before) + num_found
        counts = self._counts(both, 0 if before else num_found, until)
        num_stored = next((count for count in counts if count > num_known), 0)
        self._end_wait(came=num_stored > 0)
        return 0 < num_stored < len(both)

    def _expect(self, names: list[bytes], until: float, *, is_whole: bool) -> None:
        """Notes that the pages of a batch, or of all batches of a prompt, will come."""
        if not is_whole and len(names) >= self.batch_pages:
            self._before = names
        now = self.clock()
        self._expected = {name: end for name, end in self._expected.items() if end > now}
        firsts = names[:: self.batch_pages] if is_whole else names[:1]
        self._expected.update(dict.fromkeys(firsts, until))

    def _end_wait(self, *, came: bool) -> None:
        """Counts successive waits without a new page, and chooses when to wait again."""
        self._num_empty_waits = 0 if came else self._num_empty_waits + 1
        has_hope = self._num_empty_waits < self.max_empty_waits
        self._retry_at = self.clock() + (0.0 if has_hope else self.retry_interval_s)
