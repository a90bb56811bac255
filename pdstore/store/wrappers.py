"""Stores around a store: each adds one thing to any store and nothing to the contract."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from pdstore.errors import StoreClosed, StoreError, StoreFull, StoreUnavailable, WrongLength
from pdstore.metrics import Metrics
from pdstore.store.base import Store
from pdstore.types import BlockKey, Slots

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


class Metered(WrapperStore):
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


class Guarded(WrapperStore):
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


class Faulty(WrapperStore):
    """Fails on purpose, for tests: by a seeded chance, or when told to.

    error_rate, miss_rate: chance of a StoreUnavailable, and of a shorter prefix.
    hold: while set, calls wait for `release` (a store that hangs).
    corrupt_rate: chance that one byte of a value that was read is flipped.
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        miss_rate: float = 0.0,
        corrupt_rate: float = 0.0,
    ) -> None:
        super().__init__(store)
        self._random = random.Random(seed)
        self._random_lock = threading.Lock()
        self.error_rate, self.miss_rate, self.corrupt_rate = error_rate, miss_rate, corrupt_rate
        self._open = threading.Event()
        self._open.set()
        self.num_held = 0

    def hold(self) -> None:
        """From now on calls hang."""
        self._open.clear()

    def release(self) -> None:
        """Lets the calls that hang go on."""
        self._open.set()

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._fault("match")
        return self._shortened(super().match(keys))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._fault("get")
        n = self._shortened(super().get(keys, slots))
        for i in range(n):
            if self._chance(self.corrupt_rate):
                piece = slots.piece(i)
                piece[self._below(len(piece))] ^= 1 << self._below(8)
        return n

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._fault("put")
        return self._shortened(super().put(keys, slots))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._fault("remove")
        super().remove(keys)

    def clear(self, namespace: str) -> None:
        self._fault("clear")
        super().clear(namespace)

    def _fault(self, verb: str) -> None:
        if not self._open.is_set():
            self.num_held += 1
            self._open.wait(60)
            self.num_held -= 1
        if self._chance(self.error_rate):
            raise StoreUnavailable(f"{self.label}: {verb} failed on purpose")

    def _shortened(self, n: int) -> int:
        return self._below(n) if n and self._chance(self.miss_rate) else n

    def _chance(self, rate: float) -> bool:
        with self._random_lock:
            return self._random.random() < rate

    def _below(self, n: int) -> int:
        with self._random_lock:
            return self._random.randrange(n)
