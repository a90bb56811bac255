"""A lookup on its way from the scheduler to the store, and the match that it ends with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdstore.format.handoff import Handoff
from pdstore.format.keys import PromptKeys
from pdstore.outcome import Reason
from pdstore.threads import Deadline

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.020
_MATCH_S = 1.0  # what the last match of a hand-off may take beyond the wait for its marker


@dataclass(frozen=True)
class Match:
    """How much of a prompt the pool has.

    keys: the blocks that are stored; what `KVPool.load` takes.
    num_tokens: tokens in them.
    reason: why it is not the whole prompt; None if it is.
    """

    keys: PromptKeys
    num_tokens: int
    reason: Reason | None


class Lookup:
    """A match on its way. Ends by itself: with the answer, or when its time is up."""

    def __init__(
        self,
        keys: PromptKeys,
        handoff: Handoff | None,
        wait_s: float,
        count: Callable[[Match], None],
    ) -> None:
        self.keys = keys
        self._count = count
        self.handoff = handoff
        self.started_at = time.monotonic()
        self.marker_deadline = Deadline(wait_s)
        self.next_poll_at = 0.0
        self.poll_s = FIRST_POLL_S
        self.num_polls = 0
        self._deadline = Deadline(wait_s + (_MATCH_S if handoff else 0.0))
        self._answered = threading.Event()
        self._found: Match | None = None

    def poll(self) -> Match | None:
        """The match, or None: ask again later. Never blocks; never None after the deadline."""
        if self._found is None and self._deadline.is_over():
            self.finish(Match(self.keys.prefix(0), 0, Reason.DEADLINE))
        return self._found

    def wait(self, timeout_s: float) -> Match:
        """Waits for the match. Raises TimeoutError when there is none after the time."""
        end = Deadline(timeout_s)
        while (found := self.poll()) is None:
            if end.is_over():
                raise TimeoutError(f"no answer to the lookup after {timeout_s} s")
            self._answered.wait(min(LAST_POLL_S, end.remaining_s()))
        return found

    def cancel(self) -> None:
        """Nobody waits for this any more."""
        self.finish(Match(self.keys.prefix(0), 0, Reason.CANCELLED))

    def finish(self, found: Match) -> None:
        """The first answer counts."""
        if self._found is None:
            self._found = found
            self._answered.set()
            self._count(found)

    @property
    def is_over(self) -> bool:
        return self.poll() is not None
