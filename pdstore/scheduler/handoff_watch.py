"""HandoffWatch: waits for the markers of all of an instance's hand-offs, and answers their lookups.

Locking: there is none. `add` and `close` come from any thread; a wait belongs to the watch's one.
"""

# Decision: docs/decisions/014-lookups-never-block.md
from __future__ import annotations

import enum
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial

from pdstore.errors import Reason, reason_of
from pdstore.format.handoff import Handoff, Pulse
from pdstore.format.keys import BlockKey, Namespace, PromptKeys
from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import CostAverage
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.store.base import Store
from pdstore.store.watch import KeyWatch, Waiter
from pdstore.threads import call_or

_PAUSE_S = 0.1  # between two calls without news: how late a lookup that ended may be noticed
_SOON_S = 0.01  # of a wait that time may end, by an estimate or a doubt
_DOUBT_S = 0.02  # from the first look to the last one for a sign of a doubtful hand-off
_MARGIN = 1.25  # on the load, since a client waits for a D that begins late
_LATE_S = 0.05  # `started` comes late in a short prompt, and then a look and a step of D's engine
_PATIENCE_S = 60.0  # for the key that shows how long P has computed


class Verdict(enum.Enum):
    """Ways in which a wait for markers ends."""

    DONE = "P has stored the whole prompt"
    FAILED = "some of it will not come"
    BEGUN = "P stores it now, and will have computed it soon: enough for a lookup that follows"
    DEAD = "P has stopped beating"
    LATE = "its time is up"
    OTHER_POOL = "P uses another pool"
    ANSWERED = "its lookup was cancelled, or its time is long up"


_REASONS = {
    Verdict.FAILED: Reason.HANDOFF_FAILED,
    Verdict.DEAD: Reason.HANDOFF_DEAD,
    Verdict.LATE: Reason.HANDOFF_LATE,
    Verdict.OTHER_POOL: Reason.OTHER_POOL,
}
"""Why a prompt may not be whole."""


class HandoffWait(Waiter):
    """One lookup's wait for P's markers, as `KeyWatch` takes it. Asks no store itself.

    A lookup that follows ends as soon as P has answered. Where P and D were asked at once, it ends
    when what P still computes takes no longer than the load: earlier, D's blocks would only wait.
    That is when the first layer range of the last block is stored, or at the time that the cost of
    a token tells, or at once if either time is not known. After that the wait goes on until that
    key is stored, to learn how long P computes.

    lookup: of a hand-off.
    end: called once, with the verdict that ends the lookup, or the error of the store.
    is_elsewhere: asks whether P uses another pool; called once, first.
    cost: of P's prefill, for a lookup that follows.
    clock: monotonic seconds, in which looks are told.
    """

    def __init__(
        self,
        lookup: Lookup,
        namespace: Namespace,
        end: Callable[[HandoffWait, Verdict | Exception], None],
        *,
        is_elsewhere: Callable[[], bool] = lambda: False,
        cost: CostAverage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert lookup.handoff is not None
        self.lookup = lookup
        self.handoff: Handoff = lookup.handoff
        self._end = end
        self._is_elsewhere = is_elsewhere
        self._was_asked = False
        self._cost = cost or CostAverage(clock)
        self._is_ended = False
        self._begun_at: float | None = None  # when P was seen to have started
        self._last_key: BlockKey | None = None  # from then on, until it is stored
        self._was_missing = False  # a key that the first look finds tells no cost
        name = self.handoff.id
        self._failed = name.failed(namespace)
        self._started = name.started(namespace)
        self._done = [name.done(namespace, n) for n in range(namespace.num_shards)]
        self._num_asked = 1  # of `_done`: as long as one is missing, the others need no look
        self._is_doubtful = self.handoff.last_save is not None
        self._doubtful_until = float("inf")
        self._pulse: Pulse | None = None
        if name.instance is not None:  # alive now: its answer has just come
            self._pulse = Pulse(namespace, name.instance, clock=clock)

    def wanted(self) -> list[BlockKey]:
        """Returns the keys to look for next."""
        last = [] if self._last_key is None else [self._last_key]
        if self._is_ended:
            return last
        signs = [self._failed, *last]
        if self._begun_at is None and (self.lookup.follows or self._is_doubtful):
            signs.append(self._started)
        beats = self._pulse.ring if self._pulse is not None else []
        return [*self._done[: self._num_asked], *signs, *beats]

    def look_ended(self, stored: AbstractSet[BlockKey], asked_at: float) -> float | None:
        """Takes note of what is stored; ends the lookup when that, or the time, says so."""
        if self._begun_at is not None and self._last_key is not None:
            self._measure_prefill(stored, asked_at - self._begun_at)
        if not self._is_ended:
            verdict = self._judge(stored, asked_at)
            if verdict is None:
                return self._pause_s()
            self._is_ended = True
            self._end(self, verdict)
            if verdict is not Verdict.BEGUN:
                return None
        if self._begun_at is None or self._last_key is None:
            return None
        return _PAUSE_S if asked_at - self._begun_at <= _PATIENCE_S else None

    def look_failed(self, error: Exception) -> float | None:
        """Ends the lookup with the store's error."""
        if not self._is_ended:
            self._is_ended = True
            self._end(self, error)
        return None

    def _pause_s(self) -> float:
        if self._is_doubtful or self._begun_at is not None:
            return _SOON_S
        return min(_PAUSE_S, self.lookup.marker_deadline.remaining_s())

    def _judge(self, stored: AbstractSet[BlockKey], asked_at: float) -> Verdict | None:
        """Returns why the wait is over, or None."""
        if self.lookup.is_answered:
            return Verdict.ANSWERED
        if not self._was_asked:
            self._was_asked = True
            if self._is_elsewhere():
                return Verdict.OTHER_POOL
        verdict = self._judge_markers(stored, asked_at)
        if verdict is not None:
            return verdict
        if self._pulse is not None:
            self._pulse.update(stored, asked_at)
            if self._pulse.is_silent():
                return Verdict.DEAD
        if self.lookup.marker_deadline.is_over():
            return Verdict.LATE if self._begun_at is None else Verdict.BEGUN
        return None

    def _judge_markers(self, stored: AbstractSet[BlockKey], asked_at: float) -> Verdict | None:
        has_news = self._done[0] in stored
        if has_news:
            self._done = [key for key in self._done if key not in stored]
            self._num_asked = len(self._done)
        if not self._done:
            return Verdict.DONE
        has_started = self._started in stored
        self._is_doubtful &= not (has_news or has_started)
        self._doubtful_until = min(self._doubtful_until, asked_at + _DOUBT_S)
        if self._failed in stored or (self._is_doubtful and asked_at > self._doubtful_until):
            return Verdict.FAILED
        if self._is_doubtful or not self.lookup.follows:
            return None
        if self.handoff.num_tokens is not None:  # P has answered, so it has begun
            return None if has_news else Verdict.BEGUN  # the other shards' `done` may be there too
        if self._begun_at is None and has_started:
            self._begun_at = asked_at
            self._last_key = self._find_last_key()
        is_time = self._begun_at is not None and self._is_near(asked_at - self._begun_at)
        return Verdict.BEGUN if is_time else None

    def _find_last_key(self) -> BlockKey | None:
        """Returns the key that is stored last by P; None if all layers have sliding windows."""
        keys = self.lookup.keys
        namespace = keys.namespace
        parts = [part for part in namespace.parts if part.group not in namespace.windows][:1]
        last = keys.store_keys(parts, len(keys) - 1) if len(keys) else []
        return last[0] if last else None

    def _measure_prefill(self, stored: AbstractSet[BlockKey], seconds: float) -> None:
        """Adds to the cost of P's prefill once the last key is stored."""
        if self._last_key not in stored:
            self._was_missing = True
            return
        self._last_key = None
        if self._was_missing:
            self._cost.add_sample(self.lookup.keys.num_tokens, seconds)

    def _is_near(self, seconds: float) -> bool:
        """Returns whether D should begin now, so long after P was seen to have started."""
        total_s = self._cost.estimate_s(self.lookup.keys.num_tokens)
        load_s = self.lookup.load_s
        if self._last_key is None or total_s is None or load_s is None:
            return True
        return total_s - seconds <= _MARGIN * load_s + _LATE_S


class HandoffWatch:
    """Ends each lookup when P's markers are all there, P has failed or died, or its time is up.

    find: makes the last match of a lookup; takes why the prompt may not be whole (None: it is).
    patience_s: how long a call of the store may take before it counts as stuck.
    is_elsewhere: tells whether a hand-off's P uses another pool; may ask the store.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        metrics: Metrics,
        find: Callable[[PromptKeys, Reason | None], Match],
        *,
        patience_s: float,
        is_elsewhere: Callable[[Handoff], bool],
    ) -> None:
        self._namespace = namespace
        self._metrics = metrics
        self._find = find
        self._is_elsewhere = is_elsewhere
        self._cost_of_p = CostAverage()
        self._waiting: set[Lookup] = set()
        self._watch = KeyWatch(store, name="pdstore-handoffs", patience_s=patience_s)

    def add(self, lookup: Lookup) -> None:
        """Takes a lookup with a hand-off. From any thread."""
        assert lookup.handoff is not None
        self._waiting.add(lookup)
        wait = HandoffWait(
            lookup,
            self._namespace,
            self._end,
            is_elsewhere=partial(self._is_elsewhere, lookup.handoff),
            cost=self._cost_of_p,
        )
        self._watch.add(wait)

    def __len__(self) -> int:
        """Number of lookups that wait, as of the last look."""
        return len(self._waiting)

    @property
    def is_stuck(self) -> bool:
        """True while a store call takes too long: a new lookup would wait in vain."""
        return self._watch.is_stuck

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads and ends the lookups that wait."""
        self._watch.close(timeout_s)

    def _end(self, wait: HandoffWait, why: Verdict | Exception) -> None:
        lookup = wait.lookup
        self._waiting.discard(lookup)
        if isinstance(why, Exception):
            reason = reason_of(why)
            error = None if reason is Reason.CLOSED else why
            lookup.finish(Match.miss(lookup.keys, reason, error))
        elif why is Verdict.OTHER_POOL:
            lookup.finish(Match.miss(lookup.keys, Reason.OTHER_POOL))
        elif why is Verdict.BEGUN:
            lookup.finish(Match.following(lookup.keys, wait.handoff))
        else:
            self._match(lookup, why)

    def _match(self, lookup: Lookup, why: Verdict) -> None:
        """Ends a lookup with what is stored now."""
        if why in (Verdict.DONE, Verdict.LATE):
            waited_s = time.monotonic() - lookup.started_at
            self._metrics.handoff_wait_seconds.observe(waited_s)
        if lookup.poll() is not None:
            return
        is_unheard = why in (Verdict.LATE, Verdict.DEAD)
        if is_unheard and lookup.handoff is not None and self._is_elsewhere(lookup.handoff):
            why = Verdict.OTHER_POOL  # the store did not answer when the lookup came
        fault = Match.miss(lookup.keys, Reason.FAULT)
        lookup.finish(call_or(partial(self._find, lookup.keys, _REASONS.get(why)), fault))
