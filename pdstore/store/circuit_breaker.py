"""CircuitBreaker: keeps calls away from a store that fails, and retries a broken connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pdstore.errors import (
    BadValue,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.store.base import Store
from pdstore.store.wrappers import A, CallWrapper, R, WrapperStore

# Errors about one block, one budget or one closed object: the store itself is well.
_HEALTHY = (BadValue, StoreFull, StoreClosed)
_QUICK_S = 0.02
OPEN_S = 1.0
_MAX_S = 2.0
"""The longest pause: short, because a probe is one call of one thread."""


class CircuitBreaker(CallWrapper):
    """Retries once after a broken connection, and stops calling a store that fails.

    After `failures` failed calls in a row the breaker is open: calls raise StoreUnavailable at
    once, or StoreDenied if the last one was denied. After `open_s` one call is let through as a
    probe; if it fails the pause doubles, up to `max_s`. If the last failure came quickly, as from a
    replica, calls go through all the same: they cost little, and the store is used once it works.
    """

    def __init__(
        self,
        store: Store,
        *,
        failures: int = 3,
        open_s: float = OPEN_S,
        max_s: float = _MAX_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self._failures, self._open_s, self._max_s, self._clock = failures, open_s, max_s, clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause_s = open_s
        self._closed_again_at = 0.0
        self._probing = False
        self._problem: str | None = None
        self._is_full = self._is_denied = self._is_quick = False
        self._remedy = ""

    @property
    def problem(self) -> str | None:
        """The last failure of the store, or its last refusal for want of room; None if it is well.

        Any call that succeeds ends a failure; only a put that succeeds ends a want of room.
        """
        return self._problem

    @property
    def is_open(self) -> bool:
        """True while calls fail at once."""
        return self._in_a_row >= self._failures

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        if args and not args[0]:  # no keys, no I/O: that says nothing about the store
            return call(*args, **kwargs)
        return self._guarded(verb, lambda: call(*args, **kwargs))

    def _guarded(self, verb: str, function: Callable[[], R]) -> R:
        is_probe = self._enter()
        healthy = True  # also after a bad argument, which says nothing about the store
        began_at = self._clock()
        try:
            answer = self._with_retry(function)
        except StoreError as error:
            healthy = isinstance(error, _HEALTHY)
            self._is_denied = isinstance(error, StoreDenied)
            self._remedy = error.remedy
            is_lasting = isinstance(error, StoreTimeout | StoreDenied)
            self._is_quick = not is_lasting and self._clock() - began_at < _QUICK_S
            if not healthy or isinstance(error, StoreFull):
                self._problem, self._is_full = str(error), healthy
            raise
        else:
            if self._problem is not None and (not self._is_full or verb == "put"):
                self._problem = None
            return answer
        finally:
            self._leave(healthy, is_probe)

    def _with_retry(self, function: Callable[[], R]) -> R:
        """Tries again once: a connection that broke while idle shows it at its next use only."""
        try:
            return function()
        except StoreUnavailable:
            if self.is_open:
                raise
            return function()

    def _enter(self) -> bool:
        """Returns True for the probe of an open breaker; raises for every other call meanwhile."""
        with self._lock:
            if not self.is_open or self._is_quick:
                return False
            wait = self._closed_again_at - self._clock()
            if wait > 0 or self._probing:
                kind = StoreDenied if self._is_denied else StoreUnavailable
                raise kind(
                    f"{self.label} failed {self._in_a_row} times in a row;"
                    f" next try in {max(wait, 0):.1f} s",
                    remedy=self._remedy,
                )
            self._probing = True
            return True

    def _leave(self, healthy: bool, is_probe: bool) -> None:
        with self._lock:
            was_open = self.is_open
            if is_probe:
                self._probing = False
            if healthy:
                self._in_a_row, self._pause_s = 0, self._open_s
                return
            self._in_a_row += 1
            if is_probe:
                self._pause_s = min(2 * self._pause_s, self._max_s)
            if is_probe or (self.is_open and not was_open):
                self._closed_again_at = self._clock() + self._pause_s


def problem_of(store: Store) -> str | None:
    """Returns the problem that a store's breaker knows of; None if it has none, or no breaker."""
    while isinstance(store, WrapperStore):
        if isinstance(store, CircuitBreaker):
            return store.problem
        store = store.wrapped
    return None
