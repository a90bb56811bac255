"""Lookup: a match on its way from the scheduler to the store, and the Match that it ends with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.keys import PromptKeys
from pdstore.outcome import Reason
from pdstore.threads import Deadline, Latch

_MATCH_S = 1.0  # what the last match of a hand-off may take beyond the wait for its marker


@dataclass(frozen=True)
class Match:
    """The part of a prompt that the pool has, from its first token on.

    keys: the blocks that are stored, to be given to `KVPool.load`.
    num_tokens: the tokens in them.
    reason: why it is not the whole prompt, or not all that P handed over; None if it is.
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
        """Returns the match of a hand-off that P has begun: the blocks that both prompts have."""
        theirs, ours = handoff.num_tokens, keys.num_tokens
        if theirs is not None and theirs != ours:  # then the tails differ
            keys = keys.prefix(min(theirs, ours - ours % keys.block_tokens))
        return cls(keys, keys.num_tokens, None, follow=handoff.id)


def handed_over(keys: PromptKeys, handoff: Handoff | None) -> PromptKeys:
    """Returns a copy of a prompt's keys, without the tokens that it has behind the handed-over one.

    A router that has passed P's first token on gives D a prompt that is longer by it. Then the tail
    that P has stored is that of the shorter prompt. A prompt that is longer by more than its last
    block keeps all its keys: it shares only whole blocks with P's.
    """
    num_tokens = handoff.num_tokens if handoff is not None else None
    start_of_last = max(0, len(keys) - 1) * keys.block_tokens
    if num_tokens is None or not start_of_last <= num_tokens < keys.num_tokens:
        return keys.prefix(keys.num_tokens)
    return keys.cut(num_tokens)


class Lookup:
    """A match on its way. It ends once: with an answer, by `cancel`, or when its time is up.

    Any thread may ask, and a signal handler too.

    keys: the prompt.
    handoff: the hand-off whose markers it waits for; None for the pool as it is now.
    follows: True if it ends when P has answered, or will soon; else when P's last `done` is there.
    load_s: seconds that a load of the whole prompt takes; None if that is not known.
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
        load_s: float | None = None,
    ) -> None:
        self.keys, self.handoff, self.follows = keys, handoff, follows
        self.load_s = load_s
        self.started_at = time.monotonic()
        self.marker_deadline = Deadline(wait_s)
        self._deadline = Deadline(wait_s + (_MATCH_S if handoff else 0.0))
        self._count = count
        self._answers: list[Match] = []  # the first one counts
        self._ended = Latch()

    def poll(self) -> Match | None:
        """Returns the match; None while there is none, at most until the deadline. Never blocks."""
        if not self._answers and self._deadline.is_over():
            self.finish(Match.miss(self.keys, Reason.DEADLINE))
        return self._answers[0] if self._answers else None

    def wait(self, timeout_s: float) -> Match:
        """Waits for the match. Raises TimeoutError when there is none after the time."""
        end = Deadline(timeout_s)
        while (found := self.poll()) is None:
            if end.is_over():
                raise TimeoutError(f"no answer to the lookup after {timeout_s} s")
            self._ended.wait(min(self._deadline.remaining_s(), end.remaining_s()))
        return found

    def cancel(self) -> None:
        """Ends the lookup, because its request needs no answer any more."""
        if not self._answers:
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
        """True if the lookup has ended. Does not end it if its time is up, as `is_over` does."""
        return bool(self._answers)

    def is_over(self) -> bool:
        """True if the lookup has ended; ends it if its time is up."""
        return self.poll() is not None
