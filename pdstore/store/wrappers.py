"""Stores around a store: each adds one thing to any store and nothing to the contract.

`Instrumented` counts calls, seconds and bytes. `CircuitBreaker` keeps calls away from a store that
fails, and retries a broken connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from prometheus_client import Counter, Histogram

from pdstore.errors import (
    BadValue,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics
from pdstore.native.arena import Filled, Taken
from pdstore.store.base import Slots, Store

A = ParamSpec("A")
R = TypeVar("R")


class WrapperStore(Store):
    """Passes every call of the contract to another store.

    It offers none of the other store's optional protocols but those that a subclass lets through:
    one that changes `get` would verify other bytes. `CallWrapper` is the base for
    those that change no answer.
    """

    passes: tuple[type, ...] = ()
    """Optional protocols that a subclass lets through unchanged: those whose calls see no value."""

    added_bytes: int = 0
    """Bytes that a subclass adds to each value but the pool's id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.label = store.label

    @property
    def wrapped(self) -> Store:
        """The other store."""
        return self._store

    @property
    def lease_s(self) -> float:
        return self._store.lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self._store.match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._store.get(keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._store.put(keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._store.remove(keys)

    def clear(self, namespace: str) -> None:
        self._store.clear(namespace)

    def allocate(self, num_bytes: int) -> memoryview:
        return self._store.allocate(num_bytes)

    def close(self) -> None:
        self._store.close()


class CallWrapper(WrapperStore):
    """Does something around every call of another store, and changes none of its answers.

    So `find_optional` finds the other store's optional protocols through it: their calls go
    through `around` as well.
    """

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        """Makes a call of the other store and returns its answer.

        verb: the method of `Store` that the call is a form of, for example `get` for
          `get_right`.
        args: those of the call; first the keys of a batch, if it has keys, then its slots.
        """
        return call(*args, **kwargs)

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.around("match", self._store.match, keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("get", self._store.get, keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("put", self._store.put, keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.around("remove", self._store.remove, keys)

    def clear(self, namespace: str) -> None:
        self.around("clear", self._store.clear, namespace)


_DIRECTION = {"get": "load", "put": "save"}


class Instrumented(CallWrapper):
    """Counts calls by verb and outcome, their seconds, and the bytes of what was got and put."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._kept: dict[tuple[str, str], tuple[Counter, Histogram]] = {}

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        start = time.monotonic()
        try:
            answer = call(*args, **kwargs)
        except StoreError as error:
            self._note(verb, start, error)
            raise
        self._note(verb, start, answer.error if isinstance(answer, Filled) else None)
        if verb in _DIRECTION:
            self._count_bytes(_DIRECTION[verb], args, answer)
        return answer

    def _note(self, verb: str, start: float, error: StoreError | None) -> None:
        calls, seconds = self._counters(verb, "ok" if error is None else type(error).__name__)
        calls.inc()
        seconds.observe(time.monotonic() - start)

    def _counters(self, verb: str, outcome: str) -> tuple[Counter, Histogram]:
        """Keeps the labelled metrics: to look them up takes longer than to count."""
        kept = self._kept.get((verb, outcome))
        if kept is None:
            metrics = self._metrics
            kept = metrics.store_calls.labels(verb, outcome), metrics.store_seconds.labels(verb)
            self._kept[verb, outcome] = kept
        return kept

    def _count_bytes(self, direction: str, args: tuple[object, ...], answer: object) -> None:
        slots = args[1] if len(args) > 1 else None
        if isinstance(slots, Slots) and isinstance(answer, int):
            num_bytes = sum(slots.sizes[:answer])
        elif isinstance(answer, Filled | Taken):
            num_bytes = answer.num_bytes
        else:
            return
        self._metrics.bytes.labels(direction).inc(num_bytes)


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
