"""Lookup: a question of the scheduler to the store. Match: its answer. LookupQueue: asks."""

# Decision: docs/decisions/007-sliding-windows.md
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdstore.errors import Reason, StoreError, reason_of
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.store.base import Store, count_of
from pdstore.threads import Deadline, Ticker, call_or

_MATCH_S = 1.0  # for the last match of a hand-off, after the wait for its marker
_MOST_GAPS = 8
_SHORT = 8
"""A prompt of at most so many blocks is looked up whole, not its first block alone before."""


@dataclass(frozen=True)
class Match:
    """The part of a prompt that the pool has, from its first token on.

    keys: the blocks that are stored, to be given to `KVPool.load`.
    num_tokens: the tokens in them.
    reason: why it is not the whole prompt, or not all that P handed over; None if it is all.
    error: the store's error behind the reason, if there was one.
    follow: a hand-off that is still being saved: the blocks are stored already or will be soon, and
      the load has to follow it (`KVPool.load(..., follow=)`). None for blocks that are stored.
    """

    keys: PromptKeys
    num_tokens: int
    reason: Reason | None
    follow: HandoffId | None = None
    error: Exception | None = None

    @classmethod
    def miss(cls, keys: PromptKeys, reason: Reason, error: Exception | None = None) -> Match:
        """Returns the match of a prompt that was not found."""
        return cls(keys.prefix(0), 0, reason, error=error)

    @classmethod
    def following(cls, keys: PromptKeys, handoff: Handoff) -> Match:
        """Returns the match of a hand-off that P has begun: the blocks of both prompts."""
        theirs, ours = handoff.num_tokens, keys.num_tokens
        if theirs is not None and theirs != ours:  # then the tails differ
            keys = keys.prefix(min(theirs, ours - ours % keys.block_tokens))
        return cls(keys, keys.num_tokens, None, follow=handoff.id)


def handed_over(keys: PromptKeys, handoff: Handoff | None) -> PromptKeys:
    """Returns a copy of a prompt's keys that ends where the handed-over prompt ends.

    A router may append P's first token to the prompt that it sends to D. Then the tail that P has
    stored is the tail of the shorter prompt. If P's prompt ends before the last block of D's, all
    keys of D's prompt are kept, because the prompts share only whole blocks.
    """
    num_tokens = handoff.num_tokens if handoff is not None else None
    start_of_last = max(0, len(keys) - 1) * keys.block_tokens
    if num_tokens is None or not start_of_last <= num_tokens < keys.num_tokens:
        return keys.prefix(keys.num_tokens)
    return keys.cut(num_tokens)


class Lookup:
    """A match under way. It ends once: with an answer, by `cancel`, or when its time is up.

    Any thread may call it, but no signal handler, because it takes locks.

    keys: the prompt.
    handoff: the hand-off whose markers it waits for; None for the pool as it is now.
    follows: True to end when P has begun, False to end when P's last `done` is stored.
    wait_s: seconds for the answer; with a hand-off, for its markers.
    count: called with the match when the lookup ends.
    """

    def __init__(
        self,
        keys: PromptKeys,
        handoff: Handoff | None,
        wait_s: float,
        count: Callable[[Match], None],
        *,
        follows: bool = False,
    ) -> None:
        self.keys = keys
        self.handoff = handoff
        self.follows = follows
        self.started_at = time.monotonic()
        self.marker_deadline = Deadline(wait_s)
        self._deadline = Deadline(wait_s + (_MATCH_S if handoff else 0.0))
        self._count = count
        self._answers: list[Match] = []  # the first one counts
        self._ended = threading.Event()

    def poll(self) -> Match | None:
        """Returns the match; None while there is none, at most until the deadline. Never blocks."""
        if not self._answers and self._deadline.is_over():
            self.finish(Match.miss(self.keys, Reason.DEADLINE))
        return self._answers[0] if self._answers else None

    def wait(self, timeout_s: float) -> Match:
        """Waits for the match. Raises TimeoutError if there is none after `timeout_s`."""
        end = Deadline(timeout_s)
        while (found := self.poll()) is None:
            if end.is_over():
                raise TimeoutError(f"no answer to the lookup after {timeout_s} s")
            self._ended.wait(min(self._deadline.remaining_s(), end.remaining_s()))
        return found

    def cancel(self) -> None:
        """Ends the lookup, because its request needs no answer any more."""
        self.finish(Match.miss(self.keys, Reason.CANCELLED))

    def finish(self, found: Match) -> None:
        """Ends the lookup with this match unless it has ended."""
        if self._answers:
            return
        self._answers.append(found)  # atomic, so one of several threads is the first
        if self._answers[0] is found:
            self._ended.set()
            self._count(found)

    @property
    def is_answered(self) -> bool:
        """True if the lookup has ended. Unlike `poll`, does not end a lookup whose time is up."""
        return bool(self._answers)


class LookupQueue:
    """Answers lookups of the pool as it is now, one after the other on its own thread.

    Any thread may add a lookup.

    find: asks the store; an exception ends only that lookup, as a fault.
    patience_s: how long a call of the store may take before it counts as stuck.
    """

    def __init__(self, find: Callable[[PromptKeys], Match], patience_s: float) -> None:
        self._find = find
        self._patience_s = patience_s
        self._call_deadline: Deadline | None = None  # while a call runs
        self._lookups: deque[Lookup] = deque()
        self._thread = Ticker("pdstore-lookups", self._turn)

    def add(self, lookup: Lookup) -> None:
        self._lookups.append(lookup)
        self._thread.wake()

    def __len__(self) -> int:
        return len(self._lookups)

    @property
    def is_stuck(self) -> bool:
        """True while a store call takes too long: a new lookup would wait in vain."""
        deadline = self._call_deadline
        return deadline is not None and deadline.is_over()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread and ends the lookups that it did not answer."""
        self._thread.stop(timeout_s)
        while (lookup := self._next()) is not None:
            lookup.finish(Match.miss(lookup.keys, Reason.CLOSED))

    def _turn(self) -> None:
        while (lookup := self._next()) is not None:
            if lookup.poll() is not None:
                continue
            self._call_deadline = Deadline(self._patience_s)
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
    """Returns how much of the prompt the store has; an error of the store is a miss.

    because: the known reason why the prompt may be incomplete.
    """
    try:
        num_blocks = num_usable(store, keys)
    except StoreError as error:
        return Match.miss(keys, reason_of(error), error.with_traceback(None))
    num_tokens = keys.end_of(num_blocks)
    if num_tokens == keys.num_tokens:
        return Match(keys, num_tokens, None)
    return Match(keys.prefix(num_tokens), num_tokens, because or Reason.ABSENT)


def num_usable(store: Store, keys: PromptKeys) -> int:
    """Returns how many leading blocks can be loaded, to compute on after them. Raises StoreError.

    A KV group with a sliding window needs only the blocks that the next token sees: those in the
    window before the end. A gap in them makes the prompt end before the gap.
    """
    parts, windows = keys.namespace.parts, keys.namespace.windows
    if not windows:
        # most prompts are new to the pool, and to make all keys of a long prompt takes a while
        first = keys.prefix(keys.block_tokens).store_keys(parts)
        if len(keys) > _SHORT and _match(store, first) < len(first):
            return 0
        return _match(store, keys.store_keys(parts)) // len(parts)
    whole = [part for part in parts if part.group not in windows]
    count = _match(store, keys.store_keys(whole)) // len(whole) if whole else len(keys)
    for _ in range(_MOST_GAPS):
        gap = _last_gap(store, keys.prefix(keys.end_of(count)))
        if gap is None:
            return count
        count = gap
    return _match(store, keys.prefix(keys.end_of(count)).store_keys(parts)) // len(parts)


def _match(store: Store, keys: Sequence[BlockKey]) -> int:
    return count_of(store.match(keys), keys, store)


def _last_gap(store: Store, keys: PromptKeys) -> int | None:
    """Returns the last block in the windows before the end of `keys` that is not stored whole."""
    wanted: list[tuple[int, BlockKey]] = []
    for part in keys.namespace.parts:
        window = keys.namespace.windows.get(part.group)
        if window is not None:
            first = max(0, keys.num_tokens - window) // keys.block_tokens
            wanted += enumerate(keys.store_keys([part], first), first)
    wanted.sort(key=lambda pair: -pair[0])
    found = _match(store, [key for _, key in wanted])
    return None if found == len(wanted) else wanted[found][0]
