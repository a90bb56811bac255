"""HandoffWatch: waits for the markers of all hand-offs to an instance, and ends their lookups.

There are no locks. Any thread may call `add` and `close`. After `add`, only the watch's own thread
uses the HandoffWait.
"""

# Decision: docs/decisions/014-lookups-never-block.md
from __future__ import annotations

import enum
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from pdstore.errors import Reason, reason_of
from pdstore.format.handoff import Handoff, Pulse
from pdstore.format.keys import BlockKey, Namespace, PromptKeys
from pdstore.metrics import Metrics
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.store.base import Store
from pdstore.store.optional import meeting_store_of
from pdstore.store.watch import KeyWatch, Waiter
from pdstore.threads import call_or

_MAX_INTERVAL_S = 0.1  # between two calls of the store while it tells no change
_SHORT_INTERVAL_S = 0.01  # the same if P could not store all of its last save
_HANG_TIMES = 5  # a call that takes so many times its timeout counts as one that timed out
_SIGN_TIMEOUT_S = 0.02  # of the wait for `started` or `done` after such a save


class Verdict(enum.Enum):
    """Ways in which a wait for markers ends.

    reason: why the pool may have only a part of the prompt; None if the verdict does not say so.
    """

    DONE = "P has stored the whole prompt"
    FAILED = "some of it will not come", Reason.HANDOFF_FAILED
    BEGUN = "P stores it now: enough for a lookup that follows"
    DEAD = "P has stopped beating", Reason.HANDOFF_DEAD
    GONE = "the store has no sign of P or of the hand-off", Reason.HANDOFF_GONE
    LATE = "its deadline has passed", Reason.HANDOFF_LATE
    OTHER_POOL = "P uses another pool", Reason.OTHER_POOL

    def __init__(self, means: str, reason: Reason | None = None) -> None:
        self.means = means
        self.reason = reason


class HandoffWait(Waiter):
    """The wait of one lookup for P's markers. A `KeyWatch` asks the store for them.

    A lookup that follows ends as soon as P has answered. If the router asked P and D at the same
    time, the lookup ends as soon as P has stored `started`. If that lookup is held, the wait goes
    on while its request does, until P is done, has failed or is silent.

    lookup: a lookup with a hand-off.
    end: a function that ends the lookup; called once, with a verdict or with the store's error.
    is_elsewhere: returns whether the hand-off's P uses another pool; called once, after the first
      answer.
    clock: returns monotonic seconds; `asked_at` is such a time.
    """

    def __init__(
        self,
        lookup: Lookup,
        namespace: Namespace,
        end: Callable[[HandoffWait, Verdict | Exception], None],
        *,
        is_elsewhere: Callable[[Handoff], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert lookup.handoff is not None
        self.lookup = lookup
        self.handoff: Handoff = lookup.handoff
        self._end = end
        self._is_elsewhere = is_elsewhere
        self._follows = lookup.follows  # until P has begun
        self._was_asked = False
        self._has_sign = False  # the store had a marker or a beat
        name = self.handoff.id
        self._failed = name.failed(namespace)
        self._started = name.started(namespace)
        self._done = [name.done(namespace, n) for n in range(namespace.num_shards)]
        self._num_asked = 1  # how many of `_done` to ask for; only one until that is stored
        self._may_have_failed = self.handoff.last_save is not None
        self._sign_deadline = float("inf")
        # P's answer has just come, so P is alive now
        self._pulse = Pulse(namespace, name.instance, clock=clock)

    @property
    def is_over(self) -> bool:
        """True if the lookup has its last answer, or its request was served."""
        return self.lookup.is_answered and not self.lookup.is_followed

    def wanted(self) -> list[BlockKey]:
        """Returns the keys that the store is to be asked for next."""
        signs = [self._failed]
        if self._follows or self._may_have_failed:
            signs.append(self._started)
        return [*self._done[: self._num_asked], *signs, *self._pulse.beat_keys]

    def on_search(self, stored: AbstractSet[BlockKey], asked_at: float) -> float | None:
        """Ends the lookup if there is a verdict; else returns the seconds until the next call."""
        if self.is_over:
            return None
        verdict = self._judge(stored, asked_at)
        if verdict is not None:
            self._end(self, verdict)
            self._follows = False
            return _MAX_INTERVAL_S if self._goes_on(verdict) else None
        if self.lookup.is_answered:
            return _MAX_INTERVAL_S
        if self._may_have_failed:
            return _SHORT_INTERVAL_S
        return min(_MAX_INTERVAL_S, self.lookup.marker_deadline.remaining_s())

    def on_search_error(self, error: Exception) -> float | None:
        """Ends the lookup with the store's error; but an answer that it has stays."""
        if self.lookup.is_followed and reason_of(error) is not Reason.CLOSED:
            return _MAX_INTERVAL_S
        self._end(self, error)
        return None

    def _goes_on(self, verdict: Verdict) -> bool:
        return verdict is Verdict.BEGUN and self.lookup.is_followed

    def _judge(self, stored: AbstractSet[BlockKey], asked_at: float) -> Verdict | None:
        """Returns why the wait is over; None if it goes on."""
        if not self._was_asked:
            self._was_asked = True
            if self._is_elsewhere(self.handoff):
                return Verdict.OTHER_POOL
        self._has_sign |= any(key in stored for key in self.wanted())
        verdict = self._judge_markers(stored, asked_at)
        if verdict is not None:
            return verdict
        self._pulse.update(stored, asked_at)
        if self._pulse.is_silent():
            return Verdict.DEAD if self._has_sign else Verdict.GONE
        is_late = not self.lookup.is_answered and self.lookup.marker_deadline.is_over()
        return Verdict.LATE if is_late else None

    def _judge_markers(self, stored: AbstractSet[BlockKey], asked_at: float) -> Verdict | None:
        has_news = self._done[0] in stored
        if has_news:
            self._done = [key for key in self._done if key not in stored]
            self._num_asked = len(self._done)
        if not self._done:
            return Verdict.DONE
        has_started = self._started in stored
        self._may_have_failed &= not (has_news or has_started)
        self._sign_deadline = min(self._sign_deadline, asked_at + _SIGN_TIMEOUT_S)
        if self._failed in stored or (self._may_have_failed and asked_at > self._sign_deadline):
            return Verdict.FAILED
        if self._may_have_failed or not self._follows:
            return None
        if self.handoff.num_tokens is not None:  # P has answered, so it has begun
            return None if has_news else Verdict.BEGUN  # first ask for the other shards' `done`
        return Verdict.BEGUN if has_started else None


class HandoffWatch:
    """Waits for the hand-offs of many lookups; ends each lookup when there is a `Verdict` on it.

    find: returns the match that ends a lookup; its second argument is the reason why the pool may
      have only a part of the prompt, or None.
    call_timeout_s: how long a call of the store may take before it counts as stuck.
    is_elsewhere: returns whether the P of a hand-off uses another pool; may ask the store.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        metrics: Metrics,
        find: Callable[[PromptKeys, Reason | None], Match],
        *,
        call_timeout_s: float,
        is_elsewhere: Callable[[Handoff], bool],
    ) -> None:
        self._namespace = namespace
        self._metrics = metrics
        self._find = find
        self._is_elsewhere = is_elsewhere
        self._call_timeout_s = call_timeout_s
        meeting = meeting_store_of(store)
        self._watch = KeyWatch(meeting, name="pdstore-handoffs", timeout_s=call_timeout_s)

    def add(self, lookup: Lookup) -> None:
        """Adds a lookup with a hand-off. Any thread may call it."""
        wait = HandoffWait(lookup, self._namespace, self._end, is_elsewhere=self._is_elsewhere)
        self._watch.add(wait)

    @property
    def is_stuck(self) -> bool:
        """True while a store call takes too long, so that a new lookup would get no answer."""
        return self._watch.is_stuck

    def hangs(self, handoff: Handoff) -> bool:
        """True if the running call of the store has taken so long that a lookup must not wait.

        A call that ends in time may still find the markers, so most lookups wait five times as long
        as a new one would; not so for a hand-off that P itself expects to fail.
        """
        times = _HANG_TIMES if handoff.last_save is None else 1
        return self._watch.call_s > times * self._call_timeout_s

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads and ends all lookups that still wait."""
        self._watch.close(timeout_s)

    def _end(self, wait: HandoffWait, why: Verdict | Exception) -> None:
        lookup = wait.lookup
        if isinstance(why, Exception):
            reason = reason_of(why)
            lookup.finish(Match.miss(lookup.keys, reason, None if reason is Reason.CLOSED else why))
        elif why is Verdict.OTHER_POOL:
            lookup.finish(Match.miss(lookup.keys, Reason.OTHER_POOL))
        elif why is Verdict.BEGUN:
            lookup.finish(Match.following(lookup.keys, wait.handoff))
        else:
            self._match(lookup, why)

    def _match(self, lookup: Lookup, why: Verdict) -> None:
        """Ends a lookup with a match of what the pool has now; a followed one gets a new answer."""
        is_followed = lookup.is_followed
        if why in (Verdict.DONE, Verdict.LATE) and not is_followed:
            self._metrics.handoff_wait_seconds.observe(time.monotonic() - lookup.started_at)
        if lookup.poll() is not None and not is_followed:
            return
        is_unheard = why in (Verdict.LATE, Verdict.DEAD, Verdict.GONE)
        if is_unheard and lookup.handoff is not None and self._is_elsewhere(lookup.handoff):
            why = Verdict.OTHER_POOL  # at the first answer, the pool's id was not known
        fault = Match.miss(lookup.keys, Reason.FAULT)
        found = call_or(partial(self._find, lookup.keys, why.reason), fault)
        if found.num_tokens and found.reason is Reason.HANDOFF_GONE:
            found = replace(found, reason=Reason.HANDOFF_DEAD)  # P has stored a part of it
        if not is_followed:
            lookup.finish(found)
        elif found.error is None:
            lookup.renew_answer(found)
        elif why.reason is not None:  # what the store could not tell is not promised
            lookup.renew_answer(replace(found, reason=why.reason))
