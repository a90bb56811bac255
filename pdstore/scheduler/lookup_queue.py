"""LookupQueue: answers lookups at once if it can, else one after the other on its own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdstore.format.keys import PromptKeys
from pdstore.outcome import Reason
from pdstore.scheduler.call_watch import CallWatch
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.threads import Ticker, call_or


class LookupQueue:
    """Lookups of the pool as it is now. Any thread may add one.

    find: asks the store; whatever it raises ends that one lookup as a fault.
    patience_s: how long a call of the store may take before it counts as stuck.
    """

    def __init__(self, find: Callable[[PromptKeys], Match], patience_s: float) -> None:
        self._find = find
        self._calls = CallWatch(patience_s)
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
        return self._calls.is_stuck

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread and ends the lookups that it did not answer."""
        self._thread.stop(timeout_s)
        while (lookup := self._next()) is not None:
            lookup.finish(Match.miss(lookup.keys, Reason.CLOSED))

    def _turn(self) -> None:
        while (lookup := self._next()) is not None:
            if not lookup.is_over():
                with self._calls.calling():
                    found = self._answer(lookup.keys)
                lookup.finish(found)

    def _next(self) -> Lookup | None:
        try:
            return self._lookups.popleft()
        except IndexError:
            return None

    def _answer(self, keys: PromptKeys) -> Match:
        return call_or(lambda: self._find(keys), Match.miss(keys, Reason.FAULT))
