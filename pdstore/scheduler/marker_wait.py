"""MarkerWait: one lookup's wait for P's markers."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pdstore.format.handoff import Handoff
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import Namespace
from pdstore.scheduler.handoff_progress import HandoffProgress
from pdstore.scheduler.lookup import Lookup
from pdstore.scheduler.rates import PrefillRate

_DOUBT_S = 0.02  # from the first look to the last one for a sign of a doubtful hand-off


class Verdict(enum.Enum):
    """Ways in which a wait for markers ends."""

    DONE = "P has stored the whole prompt"
    FAILED = "some of it will not come"
    BEGUN = "P stores it now, and will have computed it soon: enough for a lookup that follows"


class MarkerWait:
    """The markers that one lookup still waits for. Asks no store: `take` is told what is there.

    lookup, handoff: the hand-off is the lookup's.
    pace: the cost of P's prefill, for a lookup that follows.
    clock: monotonic seconds.
    progress: P's, from `started` on; None before that, and if P has answered.
    follows_next: it ends with the next `take`: one rank's `done` is there, the others' may be, too.
    is_doubtful: P may be unable to store any marker, and not even `started` has shown.
    """

    def __init__(
        self,
        lookup: Lookup,
        handoff: Handoff,
        namespace: Namespace,
        *,
        pace: PrefillRate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lookup, self.handoff = lookup, handoff
        self._failed = handoff.id.failed(namespace)
        self._started = handoff.id.started(namespace)
        self._done = [handoff.id.done(namespace, n) for n in range(namespace.num_shards)]
        self._wanted = self._done[:1]  # as long as one is missing, the others need not be asked for
        self._pace, self._clock = pace or PrefillRate(clock), clock
        self.progress: HandoffProgress | None = None
        self.follows_next = False
        self.is_doubtful = handoff.last_save is not None
        self._doubtful_until = float("inf")

    def wanted(self, *, with_failed: bool) -> list[BlockKey]:
        """Returns the keys to look for next."""
        started = [self._started] if self.lookup.follows or self.is_doubtful else []
        if self.progress is not None:
            started = self.progress.wanted()
        return self._wanted + started + ([self._failed] if with_failed else [])

    @property
    def failed(self) -> BlockKey:
        """The key that is stored when some of the prompt will not come."""
        return self._failed

    def take(
        self, stored: set[BlockKey], looked_for: AbstractSet[BlockKey] = frozenset()
    ) -> Verdict | None:
        """Takes note of markers that are stored. Returns why the wait is over, or None.

        looked_for: keys among which they were found; else the store has named them.
        """
        is_news = self._wanted[0] in stored
        self.follows_next = False
        if is_news:
            self._done = self._wanted = [key for key in self._done if key not in stored]
        if not self._done:
            return Verdict.DONE
        self.is_doubtful &= not is_news and self._started not in stored
        if self._started in looked_for:
            self._doubtful_until = min(self._doubtful_until, self._clock() + _DOUBT_S)
        if self._failed in stored or (self.is_doubtful and self._clock() > self._doubtful_until):
            return Verdict.FAILED
        if self.is_doubtful or not self.lookup.follows:
            return None
        has_answered = self.handoff.num_tokens is not None  # so P has begun
        if has_answered and not is_news:
            return Verdict.BEGUN
        self.follows_next = has_answered
        return Verdict.BEGUN if self._is_time(stored, looked_for) else None

    def _is_time(self, stored: set[BlockKey], looked_for: AbstractSet[BlockKey]) -> bool:
        """True if D should take engine blocks although P still computes."""
        if self.progress is not None:
            self.progress.note(stored, looked_for)
        elif self._started in stored:
            self.progress = HandoffProgress(
                self.lookup.keys, self._pace, self.lookup.load_s, self._clock
            )
        return self.progress is not None and self.progress.why_begin() is not None
