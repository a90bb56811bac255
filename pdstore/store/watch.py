"""KeyWatch: waits until keys are stored; one search of the store is for the keys of all waiters."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from pdstore.errors import StoreClosed, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.base import Store, count_of, stored_among
from pdstore.store.optional import FindsKeys, TellsChanges
from pdstore.threads import Deadline, Ticker, call_or

T = TypeVar("T")

_FIRST_S = 0.002  # the shortest pause
_GROWTH = 1.3  # each pause is so many times as long as the pause before
_LISTEN_S = 0.1  # time limit of one wait for a change; `close` may have to wait for its end
_SETTLE_S = 0.0005  # one search finds all changes within this time
_RETRY_S = 1.0  # pause after a wait for a change has raised a StoreError
_MAX_REST_S = 0.5  # the longest time for which a slow call keeps the next one away
_TOLD_LAST_S = 0.05  # the longest pause if the store tells of changes: it misses other hosts' puts


class Pace:
    """Chooses the pauses between searches: short after progress, and then longer and longer.

    The pauses also leave the store time for other users.

    last_s: the longest pause.
    share: calls of the store take at most 1 / share of the time, but even after a call that hung
      the next one comes within half a second: new waiters must not pay for an old fault.
    """

    def __init__(
        self, last_s: float = 0.020, share: int = 4, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._last_s = last_s
        self._clock = clock
        self._share = share
        self._pause_s = _FIRST_S
        self._idle_until = 0.0

    def hurry(self) -> None:
        """Says that there was progress, so that the next pause is the shortest."""
        self._pause_s = _FIRST_S

    def blocked_s(self) -> float:
        """Seconds from now in which the store must not be called, even if values are put."""
        return max(0.0, self._idle_until - self._clock())

    def after(self, took_s: float) -> float:
        """Returns the pause after calls of the store that took so many seconds."""
        self._idle_until = self._clock() + min((self._share - 1) * took_s, _MAX_REST_S)
        pause_s = self._pause_s
        self._pause_s = min(pause_s * _GROWTH, self._last_s)
        return max(pause_s, self.blocked_s())


class Waiter(ABC):
    """An object that waits for keys, for `KeyWatch.add`.

    The watch calls it on the watch's threads, one call at a time, until one call returns None.
    """

    @abstractmethod
    def wanted(self) -> Sequence[BlockKey]:
        """Returns the keys to search for next."""

    @abstractmethod
    def look_ended(self, stored: AbstractSet[BlockKey], asked_at: float) -> float | None:
        """Takes the outcome of a search for the keys of all waiters.

        stored: the keys that were found, also those of other waiters.
        asked_at: when the search began, in monotonic seconds.
        Returns the seconds after which it must be called again even if none of its keys has
        appeared or disappeared; None if it does not wait any longer.
        """

    @abstractmethod
    def look_failed(self, error: Exception) -> float | None:
        """Takes a search's error, or StoreClosed at the end; returns the same as `look_ended`."""


class KeyWatch:
    """Searches the store for the keys of all waiters together, on threads of its own.

    A search is one call of the store if the store has `FindsKeys`; otherwise it is one call for
    each key. If the store tells of changes (`TellsChanges`), each change starts a search. If not, a
    thread searches again and again; these calls take at most a quarter of the thread's time.

    If a search raises a StoreError, every waiter is told. Any other exception is told only to the
    waiters whose keys cause it.

    patience_s: a call of the store that takes longer counts as stuck.
    pace: chooses the pauses between searches; None takes a `Pace` that suits the store.
    """

    def __init__(
        self, store: Store, *, name: str, patience_s: float = 1.0, pace: Pace | None = None
    ) -> None:
        self._store = store
        self._finder = store.optional(FindsKeys)
        self._teller = store.optional(TellsChanges)
        told = Pace(last_s=_TOLD_LAST_S, share=2)
        self._pace = pace or (told if self._teller is not None else Pace())
        self._patience_s = patience_s
        self._called_at: float | None = None  # while a call runs: when it began
        self._closed = False
        self._arrivals: deque[Waiter] = deque()
        # the keys of each waiter, and when it must be called in any case
        self._wishes: dict[Waiter, tuple[Sequence[BlockKey], float]] = {}
        self._found: set[BlockKey] = set()  # by the last search
        self._is_listening = False
        self._seen: int | None = None
        self._thread = Ticker(name, self._turn)
        self._listener = Ticker(f"{name}-changes", self._listen) if self._teller else None

    def add(self, waiter: Waiter) -> None:
        """Adds a waiter; the watch calls the waiter soon. Any thread may call `add`."""
        self._arrivals.append(waiter)
        self._thread.wake()
        if self._listener is not None and not self._is_listening:
            self._listener.wake()
        if self._closed:
            self._end_arrivals()

    @property
    def is_stuck(self) -> bool:
        """True while a call of the store takes too long: a new waiter would wait in vain."""
        return self.call_s > self._patience_s

    @property
    def call_s(self) -> float:
        """The seconds that the running call of the store has taken so far; 0 if none runs."""
        called_at = self._called_at
        return time.monotonic() - called_at if called_at is not None else 0.0

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads, and tells StoreClosed to all waiters."""
        limit = Deadline(timeout_s)
        self._closed = True
        if self._listener is not None:
            self._listener.stop(limit.remaining_s())
        is_stopped = self._thread.stop(limit.remaining_s())
        self._arrivals.extend(list(self._wishes))
        if is_stopped:  # else the thread still runs, and owns the wishes
            self._wishes.clear()
        self._end_arrivals()

    def _end_arrivals(self) -> None:
        error = StoreClosed(f"the watch of {self._store.label} is closed")
        while self._arrivals:
            call_or(partial(self._arrivals.popleft().look_failed, error), None)

    def _listen(self) -> float | None:
        """Waits for a change; then searches on this same thread, without waking another thread."""
        assert self._teller is not None
        self._is_listening = False  # set before the check: `add` appends before it reads this
        if not (self._arrivals or self._wishes):
            self._seen = None
            return None
        self._is_listening = True
        try:
            now = self._teller.wait_for_change(self._seen, _LISTEN_S)
        except StoreError:  # the next search raises it as well
            return _RETRY_S
        before, self._seen = self._seen, now
        if now == before:
            return 0.0
        self._thread.turn()
        return _SETTLE_S

    def _turn(self) -> float | None:
        while self._arrivals:
            waiter = self._arrivals[0]
            self._wishes[waiter] = waiter.wanted(), 0.0
            self._arrivals.popleft()
            self._pace.hurry()
        if not self._wishes:
            self._found = set()
            return None
        return self._pace.blocked_s() or self._look()

    def _look(self) -> float:
        """Searches for all keys; calls the waiters that are due, or whose keys came or went.

        Returns the seconds to the next search.
        """
        wishes = dict(self._wishes)
        all_keys = list(dict.fromkeys(key for keys, _ in wishes.values() for key in keys))
        asked_at = time.monotonic()
        found = self._search(all_keys)
        took_s = time.monotonic() - asked_at
        if isinstance(found, set):
            changed = found ^ self._found
            self._found = found
            for waiter, (keys, due_at) in wishes.items():
                if due_at <= asked_at or not changed.isdisjoint(keys):
                    self._settle(waiter, partial(waiter.look_ended, found, asked_at))
        else:
            self._report_error(wishes, found, asked_at)
        pause_s = self._pace.after(took_s)
        due_at = min((due_at for _, due_at in self._wishes.values()), default=math.inf)
        return max(min(pause_s, due_at - time.monotonic()), self._pace.blocked_s())

    def _report_error(self, waiters: Iterable[Waiter], error: Exception, asked_at: float) -> None:
        """Tells a StoreError to all waiters, and any other error to those whose keys cause one."""
        for waiter in waiters:
            keys, _ = self._wishes[waiter]
            answer = error if isinstance(error, StoreError) else self._search(keys)
            if isinstance(answer, set):
                self._settle(waiter, partial(waiter.look_ended, answer, asked_at))
            else:
                self._settle(waiter, partial(waiter.look_failed, answer))

    def _search(self, keys: Sequence[BlockKey]) -> set[BlockKey] | Exception:
        """Returns those of the keys that are stored, or the exception that the store raised."""
        fault: set[BlockKey] | Exception = RuntimeError(f"{self._store.label} raised a stray error")
        return self._timed(lambda: call_or(partial(self._which_stored, keys), fault))

    def _which_stored(self, keys: Sequence[BlockKey]) -> set[BlockKey] | Exception:
        try:
            if self._finder is not None and keys:
                return stored_among(self._finder.which_stored(keys), keys, self._store)
            found = set()
            for key in keys:
                if self._closed:
                    break
                self._called_at = time.monotonic()
                if count_of(self._store.match([key]), [key], self._store):
                    found.add(key)
            return found
        except StoreError as error:
            return error.with_traceback(None)

    def _settle(self, waiter: Waiter, call: Callable[[], float | None]) -> None:
        """Calls a waiter; forgets the waiter if the call returns None."""
        pause_s = self._timed(lambda: call_or(call, None))
        if pause_s is None:
            del self._wishes[waiter]
            return
        keys = waiter.wanted()
        has_moved = keys != self._wishes[waiter][0]
        if has_moved:
            self._pace.hurry()
        due_at = 0.0  # at the next search
        if pause_s > 0 and not has_moved:  # waiters with equal pauses are due together
            due_at = (time.monotonic() // pause_s + 1) * pause_s
        self._wishes[waiter] = keys, due_at

    def _timed(self, call: Callable[[], T]) -> T:
        """Makes a call that may use the store; `is_stuck` is true while the call takes too long."""
        self._called_at = time.monotonic()
        try:
            return call()
        finally:
            self._called_at = None
