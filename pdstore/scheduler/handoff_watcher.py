"""HandoffWatcher: waits for the markers of all of an instance's hand-offs at once.

Locking. There is none: `add` and `close` hand lookups over through a deque, and everything else
belongs to the thread that makes a turn: the watcher's own, or the one that hears of a change. Turns
exclude each other (`Ticker`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from pdstore.errors import StoreError
from pdstore.format.handoff import Handoff, is_beat
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.namespace import Namespace
from pdstore.metrics import Metrics
from pdstore.outcome import Reason, reason_of
from pdstore.scheduler.call_watch import CallWatch
from pdstore.scheduler.handoff_progress import HandoffProgress
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.marker_search import MarkerSearch
from pdstore.scheduler.marker_wait import MarkerWait, Verdict
from pdstore.scheduler.pace import Pace
from pdstore.scheduler.pool_identity import PoolIdentity
from pdstore.scheduler.pulses import Pulses
from pdstore.scheduler.rates import PrefillRate
from pdstore.scheduler.wait_index import WaitIndex
from pdstore.store.base import Store
from pdstore.store.change_listener import ChangeListener, News
from pdstore.store.find import find_optional
from pdstore.store.look_plan import LookPlan, Round
from pdstore.store.optional import FindsKeys, TellsChanges
from pdstore.threads import Deadline, Ticker, call_or

_MOST_ANSWERS = 8  # matches between two looks for markers
_UNHEARD = (Reason.HANDOFF_LATE, Reason.HANDOFF_DEAD)
_SWEEP_S = 0.05  # how late the end of a lookup, or of its time, may be noticed
_TOLD_LAST_S = 0.05  # between looks at a store that tells: it may not hear of other hosts


class HandoffWatcher:
    """Ends each lookup when P's markers are all there, P has failed or died, or its time is up.

    A lookup that follows ends as soon as P has answered, or, where P and D were asked at once, when
    P will have computed the prompt soon (`HandoffProgress`). Its match names the hand-off, unless
    all is stored by then.

    A look is one call of the store for all waits if the store can look for many keys (`FindsKeys`).
    It follows each change if the store tells of changes (`TellsChanges`); else the store is polled.
    What a store has named (`NamesChanges`) is not even looked for (`LookPlan`).

    find: makes the last match of a lookup; takes why the prompt may not be whole (None: it is).
    patience_s: how long a call of the store may take before it counts as stuck.
    on_other_pool: called with a hand-off whose P uses another pool.
    pace_of_p: what P's prefill costs; it learns from what is watched.
    pace: of the looks; None for the one that suits the store.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        metrics: Metrics,
        identity: PoolIdentity,
        find: Callable[[PromptKeys, Reason | None], Match],
        *,
        patience_s: float,
        on_other_pool: Callable[[Handoff], None],
        pace_of_p: PrefillRate | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._namespace, self._metrics, self._identity = namespace, metrics, identity
        self._find, self._on_other_pool = find, on_other_pool
        self._calls = CallWatch(patience_s)
        self._search = MarkerSearch(store)
        self._arrivals: deque[Lookup] = deque()
        self._waits, self._pulses = WaitIndex(), Pulses(namespace)
        self._new: list[MarkerWait] = []  # since the last look
        self._computing: set[MarkerWait] = set()  # or whose P may not save: time may end them
        self._answers: deque[tuple[Lookup, Reason | None]] = deque()  # what is left is a match
        self._pace_of_p = pace_of_p or PrefillRate()
        self._watched: list[HandoffProgress] = []  # of lookups that ended early, to learn the pace
        self._sweep_deadline = Deadline(0.0)
        self._listener: ChangeListener | None = None
        self._pace = pace or Pace()
        teller = find_optional(store, TellsChanges)
        finds = find_optional(store, FindsKeys) is not None
        self._plan = LookPlan(self._wanted, teller if finds else None)
        if teller is not None:
            self._listener = ChangeListener(teller, self._hear)
            self._pace = pace or Pace(last_s=_TOLD_LAST_S, calls_per_s=None, share=2)
        self._thread = Ticker("pdstore-handoffs", self._turn)  # the last: it uses all of these

    def add(self, lookup: Lookup) -> None:
        """Takes a lookup with a hand-off. From any thread."""
        self._arrivals.append(lookup)
        self._thread.wake()

    def _hear(self, news: News) -> None:
        self._plan.tell(news)
        self._thread.turn()

    def __len__(self) -> int:
        """Number of lookups that wait, as of the last look."""
        return len(self._arrivals) + len(self._waits) + len(self._answers)

    @property
    def is_stuck(self) -> bool:
        """True while a store call takes too long: a new lookup would wait in vain."""
        return self._calls.is_stuck

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads and ends the lookups that wait."""
        limit = Deadline(timeout_s)
        if self._listener is not None:
            self._listener.close(limit.remaining_s())
        is_stopped = self._thread.stop(limit.remaining_s())
        waiting = [wait.lookup for wait in self._waits] + [answer[0] for answer in self._answers]
        for lookup in [*self._arrivals, *waiting]:
            lookup.finish(Match.miss(lookup.keys, Reason.CLOSED))
        if is_stopped:  # else the thread is in a store call, and owns these
            self._arrivals.clear()
            self._answers.clear()
            self._drop(self._waits)

    def _turn(self) -> float | None:
        with self._calls.calling():
            self._identity.refresh()
        self._let_in()
        self._sweep()
        is_looking = bool(self._waits or self._watched)
        if self._listener is not None:
            self._listener.listen() if is_looking else self._listener.rest()
        pause = min(self._look(), _SWEEP_S) if is_looking else self._identity.remaining_s
        if any(wait.is_doubtful for wait in self._computing):
            pause = min(pause, _SWEEP_S / 5)  # what may not come is given up sooner
        self._answer()
        return 0.0 if self._answers else pause

    def _let_in(self) -> None:
        """Takes the lookups that arrived."""
        while self._arrivals:
            lookup = self._arrivals.popleft()
            handoff = lookup.handoff
            assert handoff is not None
            if self._is_elsewhere(handoff):
                lookup.finish(Match.miss(lookup.keys, Reason.OTHER_POOL))
                continue
            wait = MarkerWait(lookup, handoff, self._namespace, pace=self._pace_of_p)
            self._waits.add(wait)
            self._pulses.add(wait)
            self._new.append(wait)
            self._plan.ask(wait.wanted(with_failed=True))
            self._pace.hurry()

    def _is_elsewhere(self, handoff: Handoff) -> bool:
        """Looks whether P uses another pool, and tells if so."""
        with self._calls.calling():
            if self._identity.is_same(handoff.pool_id):
                return False
        self._on_other_pool(handoff)
        return True

    def _sweep(self) -> None:
        """Drops the waits whose lookup has ended, and ends those whose time is up."""
        if self._plan.is_told or not self._sweep_deadline.is_over():  # news does not wait for it
            return
        self._sweep_deadline = Deadline(_SWEEP_S)
        now = time.monotonic()
        late = [wait for wait in self._waits if wait.lookup.marker_deadline.at <= now]
        for wait in late:
            self._observe_wait(wait.lookup)
            if wait.progress is None:
                self._answers.append((wait.lookup, Reason.HANDOFF_LATE))
            else:  # P computes: the load ends when nothing more is stored for as long again
                self._begin(wait, wait.progress, "deadline")
        self._drop(late)
        self._drop([wait for wait in self._waits if wait.lookup.is_answered])

    def _look(self) -> float:
        """Takes note of what was named, looks for more; returns the seconds to the next look."""
        if named := self._plan.named():
            self._note(named)
        blocked_s = self._pace.blocked_s()
        if blocked_s > 0:
            return blocked_s
        keys = self._plan.next()
        started_at = time.monotonic()
        found = call_or(partial(self._search_for, keys), None)
        if found is None:
            self._look_at_each()
        else:
            self._note({key for key in found if not is_beat(key)}, set(self._search.looked_for))
            heard = self._plan.note(found)
            if heard is not None and self._search.is_whole(len(keys)):
                self._drop_dead(heard)
        num_calls = self._search.num_calls(len(keys))
        pause_s = self._pace.after(num_calls, time.monotonic() - started_at)
        remaining_s = self._plan.remaining_s
        return pause_s if remaining_s is None else max(remaining_s, self._pace.blocked_s())

    def _wanted(self, with_failed: bool) -> list[BlockKey]:
        wanted = self._waits.wanted(with_failed=with_failed) + self._pulses.wanted()
        watched = [key for progress in self._watched for key in progress.wanted()]
        return list(dict.fromkeys(wanted + watched)) if watched else wanted

    def _search_for(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns those of the keys that are stored; a store that errs ends all waits."""
        try:
            with self._calls.calling():
                return self._search.stored(keys)
        except StoreError as error:
            for wait in self._waits:
                why = error.with_traceback(None)
                wait.lookup.finish(Match.miss(wait.lookup.keys, reason_of(error), why))
            self._watched = []
            self._drop(self._waits)
            return set()

    def _look_at_each(self) -> None:
        """Finds the wait whose keys make the store raise what no store may, and ends it."""
        for wait in self._waits:
            found = call_or(partial(self._search_for, wait.wanted(with_failed=True)), None)
            if found is None:
                wait.lookup.finish(Match.miss(wait.lookup.keys, Reason.FAULT))
            else:
                self._note(found)
        self._drop([wait for wait in self._waits if wait.lookup.is_over()])

    def _drop_dead(self, heard: Round) -> None:
        """Ends the waits whose P has not beaten for too long when the store was looked through."""
        dead = self._pulses.note(heard.found, heard.began_at)
        self._answers.extend((wait.lookup, Reason.HANDOFF_DEAD) for wait in dead)
        self._drop(dead)

    def _note(self, found: set[BlockKey], looked_for: AbstractSet[BlockKey] = frozenset()) -> None:
        """Takes note of markers, found or named, and ends the waits that they end, or time does."""
        if found:
            self._pace.hurry()
        for progress in self._watched:
            progress.note(found, looked_for)
        self._watched = [progress for progress in self._watched if not progress.is_over]
        news_of = dict.fromkeys(self._waits.about(found))
        concerned = dict.fromkeys([*news_of, *self._new, *self._computing])
        self._new.clear()
        for wait in concerned:
            if self._is_ended(wait, wait.take(found, looked_for)):
                self._drop([wait])
            else:
                self._waits.renew(wait)
                self._new += [wait] if wait.follows_next else []
                if wait in news_of:
                    self._plan.ask(wait.wanted(with_failed=False))
                if wait.progress is not None or wait.is_doubtful:
                    self._computing.add(wait)

    def _is_ended(self, wait: MarkerWait, verdict: Verdict | None) -> bool:
        """True if this ends the wait; its lookup is then answered or will be matched."""
        lookup = wait.lookup
        if verdict is Verdict.DONE:
            self._observe_wait(lookup)
            self._answers.append((lookup, None))
        elif verdict is Verdict.FAILED:
            self._answers.append((lookup, Reason.HANDOFF_FAILED))
        elif verdict is Verdict.BEGUN:
            if wait.progress is None:
                lookup.finish(Match.following(lookup.keys, wait.handoff))
            else:
                self._begin(wait, wait.progress, wait.progress.why_begin() or "estimate")
        return verdict is not None

    def _begin(self, wait: MarkerWait, progress: HandoffProgress, because: str) -> None:
        """Lets D load what P has stored so far, and follow it."""
        progress.count(self._metrics, because)
        self._watched.append(progress)
        self._plan.ask(progress.wanted())
        wait.lookup.finish(Match.following(wait.lookup.keys, wait.handoff))

    def _observe_wait(self, lookup: Lookup) -> None:
        self._metrics.handoff_wait_seconds.observe(time.monotonic() - lookup.started_at)

    def _answer(self) -> None:
        """Matches some of the lookups that need not wait any more."""
        for _ in range(min(_MOST_ANSWERS, len(self._answers))):
            lookup, because = self._answers.popleft()
            if lookup.is_over():
                continue
            if because in _UNHEARD and lookup.handoff and self._is_elsewhere(lookup.handoff):
                because = Reason.OTHER_POOL  # the store did not answer when the lookup came
            with self._calls.calling():
                fault = Match.miss(lookup.keys, Reason.FAULT)
                lookup.finish(call_or(partial(self._find, lookup.keys, because), fault))

    def _drop(self, waits: Iterable[MarkerWait]) -> None:
        for wait in waits:
            self._waits.remove(wait)
            self._pulses.remove(wait)
            self._computing.discard(wait)
