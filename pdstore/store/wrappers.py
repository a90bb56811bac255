"""Stores around a store: each adds one thing to any store and nothing to the contract."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from pdstore.errors import StoreClosed, StoreError, StoreFull, StoreUnavailable, WrongLength
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics
from pdstore.store.base import Slots, Store

R = TypeVar("R")

# These say something about one block, one budget or one object's life, not about the store's
# health.
_HEALTHY = (WrongLength, StoreFull, StoreClosed)


class WrapperStore(Store):
    """Passes every call to another store.

    But not `get_and_sum`: in a wrapper that changes `get`, the sums would be of other bytes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.label = store.label

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

    def codes(self) -> Mapping[str, int]:
        return self._store.codes()

    def close(self) -> None:
        self._store.close()


class Instrumented(WrapperStore):
    """Counts calls, seconds and bytes."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics

    def match(self, keys: Sequence[BlockKey]) -> int:
        with self._measured("match"):
            return super().match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.get_and_sum(keys, slots)[0]

    def get_and_sum(
        self, keys: Sequence[BlockKey], slots: Slots
    ) -> tuple[int, Sequence[int] | None]:
        with self._measured("get"):
            n, sums = self._store.get_and_sum(keys, slots)
        self._metrics.bytes.labels("load").inc(sum(slots.sizes[:n]))
        return n, sums

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        with self._measured("put"):
            n = super().put(keys, slots)
        self._metrics.bytes.labels("save").inc(sum(slots.sizes[:n]))
        return n

    def remove(self, keys: Sequence[BlockKey]) -> None:
        with self._measured("remove"):
            super().remove(keys)

    def clear(self, namespace: str) -> None:
        with self._measured("clear"):
            super().clear(namespace)

    @contextlib.contextmanager
    def _measured(self, verb: str) -> Iterator[None]:
        start, outcome = time.monotonic(), "ok"
        try:
            yield
        except StoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._metrics.store_calls.labels(verb, outcome).inc()
            self._metrics.store_seconds.labels(verb).observe(time.monotonic() - start)


class CircuitBreaker(WrapperStore):
    """One retry after a broken connection, and a breaker.

    After `failures` failed calls in a row the breaker is open: calls raise StoreUnavailable at
    once. After `open_s` one call is let through as a probe; if it fails the pause doubles, up to
    `max_s`.
    """

    def __init__(
        self,
        store: Store,
        *,
        failures: int = 3,
        open_s: float = 1.0,
        max_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self._failures, self._open_s, self._max_s, self._clock = failures, open_s, max_s, clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause_s = open_s
        self._closed_again_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Calls fail at once now."""
        return self._in_a_row >= self._failures

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self._call(keys, lambda: self._store.match(keys))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._call(keys, lambda: self._store.get(keys, slots))

    def get_and_sum(
        self, keys: Sequence[BlockKey], slots: Slots
    ) -> tuple[int, Sequence[int] | None]:
        return self._call(keys, lambda: self._store.get_and_sum(keys, slots))

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._call(keys, lambda: self._store.put(keys, slots))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        return self._call(keys, lambda: self._store.remove(keys))

    def clear(self, namespace: str) -> None:
        return self._guarded(lambda: self._store.clear(namespace))

    def _call(self, keys: Sequence[BlockKey], function: Callable[[], R]) -> R:
        # no keys, no I/O: that says nothing about the store
        return self._guarded(function) if keys else function()

    def _guarded(self, function: Callable[[], R]) -> R:
        is_probe = self._enter()
        healthy = True  # also after a bad argument, which says nothing about the store
        try:
            return self._with_retry(function)
        except StoreError as error:
            healthy = isinstance(error, _HEALTHY)
            raise
        finally:
            self._leave(healthy, is_probe)

    def _with_retry(self, function: Callable[[], R]) -> R:
        """A connection that broke while idle shows at its next use only: one retry tells."""
        try:
            return function()
        except StoreUnavailable:
            if self.is_open:
                raise
            return function()

    def _enter(self) -> bool:
        """Whether this call is the probe of an open breaker. Raises for every other one then."""
        with self._lock:
            if not self.is_open:
                return False
            wait = self._closed_again_at - self._clock()
            if wait > 0 or self._probing:
                raise StoreUnavailable(
                    f"{self.label} failed {self._in_a_row} times in a row;"
                    f" next try in {max(wait, 0):.1f} s"
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
