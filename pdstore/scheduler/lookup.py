"""Lookup: asks what the pool has of a prompt. Match: the answer. LookupQueue: finds answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pdstore.errors import Reason, StoreError, reason_of
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.scheduler.usable import FailedAfter, usable_and_shared
from pdstore.store.base import Store
from pdstore.store.tier_spans import TierSpan, spans_of
from pdstore.threads import Deadline, Ticker, call_or

_MATCH_TIMEOUT_S = 1.0  # seconds for the match that comes after the wait for a hand-off's markers
_CHECK_INTERVAL_S = 0.1  # so often `wait` looks whether the store hangs
_LASTING = (Reason.NAMESPACE, Reason.OTHER_POOL, Reason.CANCELLED, Reason.CLOSED, Reason.FAULT)
_OF_P = (Reason.HANDOFF_FAILED, Reason.HANDOFF_LATE, Reason.HANDOFF_DEAD, Reason.HANDOFF_GONE)


@dataclass(frozen=True)
class Match:
    """The leading blocks of a prompt that the pool has.

    keys: the keys of these blocks, an argument for `KVPool.load`.
    num_tokens: the number of tokens in these blocks.
    reason: why a part of the prompt is missing; None if these blocks hold all of its tokens, or all
      but the last, which D computes anyway.
    error: the store's error that is behind the reason, if there was one.
    follow: None if the blocks are stored; else the hand-off that a load must follow, as P saves it.
    found_at: when the store has answered, in seconds of the monotonic clock; its lease began then.
    spans: if the store has several tiers: where these tokens were found; else nothing.
    num_shared: if layers keep states, and a part of the prompt is missing: the tokens of the
      leading full blocks that the pool has of the layers which need all earlier tokens; else 0.
    """

    keys: PromptKeys
    num_tokens: int
    reason: Reason | None
    follow: HandoffId | None = None
    error: Exception | None = None
    found_at: float = field(default_factory=time.monotonic, compare=False, repr=False)
    num_shared: int = field(default=0, compare=False)
    spans: Sequence[TierSpan] = field(default=(), compare=False)

    def num_above(self, num_tokens: int) -> int:
        """Returns how many of the first `num_tokens` come before all that lies in a lower tier."""
        return min([num_tokens, *(span.start for span in self.spans if span.tier)])

    @property
    def may_change(self) -> bool:
        """False if the reason is one that no later look at the pool changes."""
        return self.reason not in _LASTING

    @classmethod
    def miss(cls, keys: PromptKeys, reason: Reason, error: Exception | None = None) -> Match:
        """Returns a match without any block, and the reason for that."""
        return cls(keys.prefix(0), 0, reason, error=error)

    @classmethod
    def following(cls, keys: PromptKeys, handoff: Handoff) -> Match:
        """Returns the match of a hand-off that P still saves: the blocks that P and D share."""
        theirs, ours = handoff.num_tokens, keys.num_tokens
        if theirs is not None and theirs != ours:  # the tails differ; full blocks are shared
            keys = keys.prefix(min(theirs, ours - ours % keys.block_tokens))
        if not keys.num_tokens:
            return cls.miss(keys, Reason.ABSENT)
        return cls(keys, keys.num_tokens, None, follow=handoff.id)


def handed_over(keys: PromptKeys, handoff: Handoff | None) -> PromptKeys:
    """Returns a copy of the keys of D's prompt that ends where P's prompt ends.

    A router may append P's first token to the prompt that it sends to D. Then P has stored the tail
    of the shorter prompt. If P's prompt ends before the last block of D's prompt begins, the copy
    has all keys of D's prompt, because the two prompts share only full blocks.
    """
    num_tokens = handoff.num_tokens if handoff is not None else None
    start_of_last = max(0, len(keys) - 1) * keys.block_tokens
    if num_tokens is None or not start_of_last <= num_tokens < keys.num_tokens:
        return keys.prefix(keys.num_tokens)
    return keys.cut(num_tokens)


def without_last(keys: PromptKeys, num_tokens: int) -> PromptKeys:
    """Returns a copy of the keys of a prompt of `num_tokens` tokens that ends before its last one.

    An engine computes the last token again, which it cannot take out of a state. If the keys do not
    know the tokens of the last block, the copy ends where this block begins.
    """
    end = min(keys.num_tokens, max(0, num_tokens - 1))
    try:
        return keys.cut(end)
    except ValueError:
        return keys.prefix(end)


class Lookup:
    """A match under way. It ends once: with an answer, by `cancel`, or at its deadline.

    An engine's request may wait long after the answer. A lookup that is held is renewed meanwhile
    (`pdstore.scheduler.renewal`), until `serve` or `cancel`. Only then it counts, once.

    Any thread may call it. But always the same thread must call `serve`, and `cancel` of a lookup
    that is held. A signal handler must call nothing of it, because of the locks.

    handoff: the hand-off whose markers the lookup waits for; None to match at once.
    follows: True to end when P has begun, False to end when the last `done` of P is stored.
    timeout_s: of the wait for the store's answer; with a hand-off, of the wait for its markers.
    count: a function that is called with the match when the lookup ends; if it is held, with the
      match that was served.
    num_tokens: the tokens of D's prompt, of which `keys` may be the part that P handed over.
    hangs: returns whether the store's call that the lookup needs has hung for too long; no I/O.
    hold: is called with the lookup when it has its first answer, and has it renewed; None: the
      lookup is not held.
    """

    def __init__(
        self,
        keys: PromptKeys,
        handoff: Handoff | None,
        timeout_s: float,
        count: Callable[[Match], None],
        *,
        follows: bool = False,
        num_tokens: int = 0,
        hangs: Callable[[], bool] = lambda: False,
        hold: Callable[[Lookup], None] | None = None,
    ) -> None:
        self.keys = keys
        self.num_tokens = max(num_tokens, keys.num_tokens)
        self.handoff = handoff
        self.follows = follows
        self.started_at = time.monotonic()
        self.marker_deadline = Deadline(timeout_s)
        self._deadline = Deadline(timeout_s + (_MATCH_TIMEOUT_S if handoff else 0.0))
        self._count = count
        self._hangs = hangs
        self._hold = hold
        self._answers: list[Match] = []  # only the first one is used
        self._renewed: Match | None = None
        self._is_served = False
        self._ended = threading.Event()

    def poll(self) -> Match | None:
        """Returns the match, of several the newest; None until the lookup has ended. Never blocks.

        Ends the lookup if its deadline is over, or if the store hangs: the store will not tell of
        P's markers in time.
        """
        if not self._answers and self._deadline.is_over():
            self.finish(Match.miss(self.keys, Reason.DEADLINE))
        if not self._answers and self._hangs():
            self.finish(Match.miss(self.keys, Reason.STORE_SLOW))
        return self.found if self._answers else None

    def wait(self, timeout_s: float) -> Match:
        """Waits for the match. Raises TimeoutError if there is none after `timeout_s`."""
        end = Deadline(timeout_s)
        while (found := self.poll()) is None:
            if end.is_over():
                raise TimeoutError(f"no answer to the lookup after {timeout_s} s")
            self._ended.wait(
                min(self._deadline.remaining_s(), end.remaining_s(), _CHECK_INTERVAL_S)
            )
        return found

    def cancel(self) -> None:
        """Ends the lookup of a request that needs no answer any more."""
        self.finish(Match.miss(self.keys, Reason.CANCELLED))
        self.serve(self.found)

    def finish(self, found: Match) -> None:
        """Ends the lookup with this match, unless it has ended before."""
        if self._answers:
            return
        found = self._explained(found)
        self._answers.append(found)  # atomic: one thread's match is the first for all threads
        if self._answers[0] is found:
            self._ended.set()
            if self._hold is None:
                self._count(found)
            else:
                self._hold(self)

    def renew_answer(self, found: Match) -> None:
        """Replaces the answer of a lookup that is held; does nothing after it was served."""
        if not self.is_over:
            self._renewed = self._explained(found)

    def serve(self, found: Match) -> None:
        """Counts the answer that an engine uses, and ends the renewals. Later calls do nothing."""
        if self._hold is not None and not self._is_served:
            self._is_served = True
            self._count(found)

    @property
    def found(self) -> Match:
        """The newest answer of a lookup that has ended."""
        return self._renewed or self._answers[0]

    @property
    def because(self) -> Reason | None:
        """Why the pool may have only a part of the prompt: what the wait for P has ended with."""
        return self.found.reason if self.found.reason in _OF_P else None

    @property
    def is_over(self) -> bool:
        """True if nobody needs another answer."""
        return self._is_served or (self._hold is None and self.is_answered)

    @property
    def may_be_repeated(self) -> bool:
        """True if nobody needs another answer of it, and a later look at the pool may differ."""
        return self.is_over and self.is_answered and self.found.may_change

    @property
    def is_followed(self) -> bool:
        """True while a request waits with the answer that P still saves its prompt."""
        return not self.is_over and self.is_answered and self.found.follow is not None

    @property
    def is_answered(self) -> bool:
        """True if the lookup has ended. Unlike `poll`, does not end a lookup that is late."""
        return bool(self._answers)

    def _explained(self, found: Match) -> Match:
        """Returns the match with a reason for what it lacks.

        P may have handed over less than D's prompt, all of which is found: then the reason for the
        rest is that nobody stored it. D computes the last token in any case.
        """
        if found.reason is None and found.num_tokens < self.num_tokens - 1:
            return replace(found, reason=Reason.ABSENT)
        return found


class LookupQueue:
    """Answers lookups that have no hand-off, one after the other, on a thread of its own.

    Any thread may add a lookup.

    find: asks the store and returns a match. If it raises, the lookup ends with `Reason.FAULT`.
    call_timeout_s: how long a call of the store may take before it counts as stuck.
    """

    def __init__(self, find: Callable[[PromptKeys], Match], call_timeout_s: float) -> None:
        self._find = find
        self._call_timeout_s = call_timeout_s
        self._call_deadline: Deadline | None = None  # None while no call runs
        self._lookups: deque[Lookup] = deque()
        self._thread = Ticker("pdstore-lookups", self._turn)

    def add(self, lookup: Lookup) -> None:
        self._lookups.append(lookup)
        self._thread.wake()

    @property
    def is_busy(self) -> bool:
        """True while a lookup has no answer yet."""
        return bool(self._lookups) or self._call_deadline is not None

    @property
    def is_stuck(self) -> bool:
        """True while a store call takes too long, so that a new lookup would get no answer."""
        deadline = self._call_deadline
        return deadline is not None and deadline.is_over()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread and ends the lookups that the thread has not answered."""
        self._thread.stop(timeout_s)
        while (lookup := self._next()) is not None:
            lookup.finish(Match.miss(lookup.keys, Reason.CLOSED))

    def _turn(self) -> None:
        while (lookup := self._next()) is not None:
            if lookup.poll() is not None:
                continue
            self._call_deadline = Deadline(self._call_timeout_s)
            fault = Match.miss(lookup.keys, Reason.FAULT)
            found = call_or(partial(self._find, lookup.keys), fault)
            self._call_deadline = None
            lookup.finish(found)

    def _next(self) -> Lookup | None:
        try:
            return self._lookups.popleft()
        except IndexError:
            return None


def find(store: Store, keys: PromptKeys, because: Reason | None = None) -> Match:
    """Returns which leading blocks of the prompt the store has.

    If the store fails, the blocks that it found before count, and the match has the error.

    because: the reason for the match if the store does not have all blocks; None: ABSENT.
    """
    num_shared = 0
    error = None
    try:
        num_blocks, num_shared = usable_and_shared(store, keys)
    except FailedAfter as failed:
        num_blocks, error = failed.num_blocks, failed.error
    except StoreError as caught:
        num_blocks, error = 0, caught
    num_tokens = keys.end_of(num_blocks)
    found = keys if num_tokens == keys.num_tokens else keys.prefix(num_tokens)
    spans = spans_of(store, found)
    if found is keys and error is None:
        return Match(keys, num_tokens, None, spans=spans)
    if error is None:
        reason = because or Reason.ABSENT
        shared = keys.end_of(num_shared)
        shared -= shared % keys.block_tokens
        return Match(found, num_tokens, reason, num_shared=shared, spans=spans)
    lasting = error.with_traceback(None)
    return Match(found, num_tokens, reason_of(error), error=lasting, spans=spans)
