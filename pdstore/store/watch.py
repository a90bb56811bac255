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

_MIN_INTERVAL_S = 0.002  # between two searches
_MAX_INTERVAL_S = 0.02
_MAX_INTERVAL_WITH_CHANGES_S = 0.05  # if the store tells of changes: it misses other hosts' puts
_GROWTH = 1.3  # each interval is so many times as long as the interval before
_LISTEN_TIMEOUT_S = 0.1  # of one wait for a change; `close` may have to wait for its end
_CHANGE_INTERVAL_S = 0.0005  # one search finds all changes within this time
_RETRY_INTERVAL_S = 1.0  # after a wait for a change has raised a StoreError
_MAX_IDLE_S = 0.5  # the longest time for which a slow call keeps the next one away


class Backoff:
    """Chooses the intervals between searches: short after progress, and then longer and longer.

    The intervals also leave the store time for other users.

    max_interval_s: the longest interval.
    max_duty: the part of the time that calls of the store take at most. But even after a call that
      hung the next one comes within half a second: new waiters must not pay for an old fault.
    """

    def __init__(
        self,
        max_interval_s: float = _MAX_INTERVAL_S,
        max_duty: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_interval_s = max_interval_s
        self._max_duty = max_duty
        self._clock = clock
        self._interval_s = _MIN_INTERVAL_S
        self._idle_until = 0.0

    def restart(self) -> None:
        """Makes the next interval the shortest, because there was progress."""
        self._interval_s = _MIN_INTERVAL_S

    def remaining_idle_s(self) -> float:
        """Seconds from now in which the store must not be called, even if values are put."""
        return max(0.0, self._idle_until - self._clock())

    def next_interval_s(self, took_s: float) -> float:
        """Returns the interval to the next search, after calls of the store that took `took_s`."""
        idle_s = min(took_s / self._max_duty - took_s, _MAX_IDLE_S)
        self._idle_until = self._clock() + idle_s
        interval_s = self._interval_s
        self._interval_s = min(interval_s * _GROWTH, self._max_interval_s)
        return max(interval_s, self.remaining_idle_s())


class Waiter(ABC):
    """An object that waits for keys, for `KeyWatch.add`.

    The watch calls it on the watch's threads, one call at a time, until one call returns None.
    """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True if it waits no longer; then the next search leaves out its keys."""

    @abstractmethod
    def wanted(self) -> Sequence[BlockKey]:
        """Returns the keys to search for next."""

    @abstractmethod
    def on_search(self, stored: AbstractSet[BlockKey], asked_at: float) -> float | None:
        """Takes the outcome of a search for the keys of all waiters.

        stored: the keys that were found, also those of other waiters.
        asked_at: when the search began, in monotonic seconds.
        Returns the seconds after which it must be called again even if none of its keys has
        appeared or disappeared; None if it does not wait any longer.
        """

    @abstractmethod
    def on_search_error(self, error: Exception) -> float | None:
        """Takes a search's error, or StoreClosed at the end; returns the same as `on_search`."""


class KeyWatch:
    """Searches the store for the keys of all waiters together, on threads of its own.

    A search is one call of the store if the store has `FindsKeys`; otherwise it is one call for
    each key. If the store tells of changes (`TellsChanges`), each change starts a search. If not, a
    thread searches again and again; these calls take at most a quarter of the thread's time.

    If a search raises a StoreError, every waiter is told. Any other exception is told only to the
    waiters whose keys cause it.

    timeout_s: a call of the store that takes longer counts as stuck.
    backoff: chooses the intervals between searches; None: a `Backoff` that suits the store.
    """

    def __init__(
        self, store: Store, *, name: str, timeout_s: float = 1.0, backoff: Backoff | None = None
    ) -> None:
        self._store = store
        self._finder = store.optional(FindsKeys)
        self._teller = store.optional(TellsChanges)
        if backoff is None and self._teller is not None:
            backoff = Backoff(_MAX_INTERVAL_WITH_CHANGES_S, max_duty=0.5)
        self._backoff = backoff or Backoff()
        self._timeout_s = timeout_s
        self._called_at: float | None = None  # while a call runs: when it began
        self._closed = False
        self._new_waiters: deque[Waiter] = deque()
        # the keys of each waiter, and when it must be called in any case
        self._waiters: dict[Waiter, tuple[Sequence[BlockKey], float]] = {}
        self._found: set[BlockKey] = set()  # by the last search
        self._is_listening = False
        self._seen: int | None = None
        self._thread = Ticker(name, self._turn)
        self._listener = Ticker(f"{name}-changes", self._listen) if self._teller else None

    def add(self, waiter: Waiter) -> None:
        """Adds a waiter; the watch calls the waiter soon. Any thread may call `add`."""
        self._new_waiters.append(waiter)
        self._thread.wake()
        if self._listener is not None and not self._is_listening:
            self._listener.wake()
        # add:   appends the waiter, then reads _closed
        # close: sets _closed,       then tells all new waiters
        # So a waiter that `close` did not see is told here.
        if self._closed:
            self._end_new_waiters()

    @property
    def is_stuck(self) -> bool:
        """True while a call of the store takes too long: a new waiter would wait in vain."""
        return self.call_s > self._timeout_s

    @property
    def call_s(self) -> float:
        """The seconds that the running call of the store has taken so far; 0 if none runs."""
        called_at = self._called_at
        return time.monotonic() - called_at if called_at is not None else 0.0

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads, and tells StoreClosed to all waiters."""
        deadline = Deadline(timeout_s)
        self._closed = True
        if self._listener is not None:
            self._listener.stop(deadline.remaining_s())
        is_stopped = self._thread.stop(deadline.remaining_s())
        self._new_waiters.extend(list(self._waiters))
        if is_stopped:  # else the thread still runs, and owns the waiters
            self._waiters.clear()
        self._end_new_waiters()

    def _end_new_waiters(self) -> None:
        error = StoreClosed(f"the watch of {self._store.label} is closed")
        while self._new_waiters:
            call_or(partial(self._new_waiters.popleft().on_search_error, error), None)

    def _listen(self) -> float | None:
        """Waits for a change; then searches on this same thread, without waking another thread."""
        assert self._teller is not None
        # _listen: _is_listening = False, then looks for a waiter, then sleeps
        # add:     appends the waiter,    then reads _is_listening
        # So one of them sees the other: the waiter is found here, or `add` wakes this thread.
        self._is_listening = False
        if not (self._new_waiters or self._waiters):
            self._seen = None
            return None
        self._is_listening = True
        try:
            now = self._teller.wait_for_change(self._seen, _LISTEN_TIMEOUT_S)
        except StoreError:  # the next search raises it as well
            return _RETRY_INTERVAL_S
        before, self._seen = self._seen, now
        if now == before:
            return 0.0
        self._thread.turn()
        return _CHANGE_INTERVAL_S

    def _turn(self) -> float | None:
        while self._new_waiters:
            waiter = self._new_waiters[0]
            self._waiters[waiter] = waiter.wanted(), 0.0
            self._new_waiters.popleft()  # only now: `_listen` finds it here or there at any time
            self._backoff.restart()
        for waiter in [each for each in self._waiters if each.is_over]:
            del self._waiters[waiter]
        if not self._waiters:
            self._found = set()
            return None
        return self._backoff.remaining_idle_s() or self._search_for_all()

    def _search_for_all(self) -> float:
        """Searches for all keys; calls the waiters that are due, or whose keys came or went.

        Returns the seconds to the next search.
        """
        waiters = dict(self._waiters)
        all_keys = list(dict.fromkeys(key for keys, _ in waiters.values() for key in keys))
        asked_at = time.monotonic()
        answer = self._search(all_keys)
        took_s = time.monotonic() - asked_at
        if isinstance(answer, set):
            changed = answer ^ self._found
            self._found = answer
            for waiter, (keys, due_at) in waiters.items():
                if due_at <= asked_at or not changed.isdisjoint(keys):
                    self._call(waiter, partial(waiter.on_search, answer, asked_at))
        else:
            self._report_error(waiters, answer, asked_at)
        interval_s = self._backoff.next_interval_s(took_s)
        due_at = min((due_at for _, due_at in self._waiters.values()), default=math.inf)
        return max(min(interval_s, due_at - time.monotonic()), self._backoff.remaining_idle_s())

    def _report_error(self, waiters: Iterable[Waiter], error: Exception, asked_at: float) -> None:
        """Tells a StoreError to all waiters, and any other error to those whose keys cause one."""
        for waiter in waiters:
            keys, _ = self._waiters[waiter]
            answer = error if isinstance(error, StoreError) else self._search(keys)
            if isinstance(answer, set):
                self._call(waiter, partial(waiter.on_search, answer, asked_at))
            else:
                self._call(waiter, partial(waiter.on_search_error, answer))

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

    def _call(self, waiter: Waiter, call: Callable[[], float | None]) -> None:
        """Calls a waiter; forgets the waiter if the call returns None."""
        interval_s = self._timed(lambda: call_or(call, None))
        if interval_s is None:
            del self._waiters[waiter]
            return
        keys = waiter.wanted()
        has_moved = keys != self._waiters[waiter][0]
        if has_moved:
            self._backoff.restart()
        due_at = 0.0  # at the next search
        if interval_s > 0 and not has_moved:  # waiters with equal intervals are due together
            due_at = (time.monotonic() // interval_s + 1) * interval_s
        self._waiters[waiter] = keys, due_at

    def _timed(self, call: Callable[[], T]) -> T:
        """Makes a call that may use the store; `is_stuck` is true while the call takes too long."""
        self._called_at = time.monotonic()
        try:
            return call()
        finally:
            self._called_at = None
