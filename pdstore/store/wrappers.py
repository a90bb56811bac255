"""Stores that wrap a store: `WrapperStore`, their base, and `GuardedStore`, which engines use."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

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
from pdstore.native.arena import Filled, ValueBatch
from pdstore.native.engine import Ticket
from pdstore.store.base import Slots, Store

A = ParamSpec("A")
R = TypeVar("R")


class WrapperStore(Store):
    """Passes every call of the contract to the wrapped store.

    It offers only those of the wrapped store's optional protocols that a subclass names in
    `passes`. One that changes values must name no protocol whose calls read or write values.
    """

    passes: tuple[type, ...] = ()
    """Optional protocols that a subclass passes on unchanged."""

    added_bytes: int = 0
    """Bytes that a subclass adds to each value, except to the pool's id."""

    def __init__(self, store: Store) -> None:
        self.wrapped = store
        self.label = store.label

    @property
    def lease_s(self) -> float:
        return self.wrapped.lease_s

    @property
    def expires_blocks(self) -> bool:
        return self.wrapped.expires_blocks

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.wrapped.match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.wrapped.get(keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.wrapped.put(keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.wrapped.remove(keys)

    def clear(self, namespace: str) -> None:
        self.wrapped.clear(namespace)

    def allocate(self, num_bytes: int) -> memoryview:
        return self.wrapped.allocate(num_bytes)

    def why_too_long(self, num_bytes: int) -> str | None:
        return self.wrapped.why_too_long(num_bytes + self.added_bytes)

    def codes(self) -> Mapping[str, int]:
        return self.wrapped.codes()

    def close(self) -> None:
        self.wrapped.close()


# Errors that do not count as failures of the store.
_HEALTHY = (BadValue, StoreFull, StoreClosed)
_QUICK_S = 0.02
OPEN_S = 1.0
"""Seconds between two probes of an open breaker: a short time, as a probe is only one call."""
_DIRECTION = {"get": "load", "put": "save"}


class GuardedStore(WrapperStore):
    """Measures each call, retries a call one time if the store is unavailable, and has a breaker.

    It changes no answer. So `find_optional` offers all optional protocols of the wrapped store;
    their calls go through `around` as well.

    It counts calls by verb and outcome, their seconds, and the bytes that were got and put. After
    `failures` failed calls in a row the breaker is open: calls raise StoreUnavailable at once, or
    StoreDenied if the last call was denied. After each `open_s`, one call is made as a probe. If
    the last failure came quickly, as from a replica, all calls are made.

    problem: the message of the store's last failure or of its last StoreFull; None if all is well.
      The next successful call clears a failure; only the next successful put clears a StoreFull.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        failures: int = 3,
        open_s: float = OPEN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._failures = failures
        self._open_s = open_s
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._probe_at = 0.0
        self.problem: str | None = None
        self._is_full = False
        self._is_quick = False
        self._refusal: type[StoreError] = StoreUnavailable
        self._remedy = ""

    @property
    def is_open(self) -> bool:
        """True after `failures` failed calls in a row, until a call does not fail."""
        return self._in_a_row >= self._failures

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.around("match", self.wrapped.match, keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("get", self.wrapped.get, keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("put", self.wrapped.put, keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.around("remove", self.wrapped.remove, keys)

    def clear(self, namespace: str) -> None:
        self.around("clear", self.wrapped.clear, namespace)

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        """Makes a call of the wrapped store and returns its answer.

        verb: the method of `Store` that the call is a form of, for example `get` for `get_right`.
        args: the arguments of `call`. If it takes keys and slots, these come first, in this order.
        """
        if self._pid != os.getpid() or (args and not args[0]):
            return call(*args, **kwargs)  # by a forked child, or without I/O: it is no probe
        self._check_breaker()
        is_well = True  # stays so after a ValueError, which is no failure of the store
        is_retry = False
        try:
            while True:
                began_at = self._clock()
                try:
                    answer = call(*args, **kwargs)
                except StoreError as error:
                    self._measure(verb, began_at, error)
                    if isinstance(error, StoreUnavailable) and not (is_retry or self.is_open):
                        is_retry = True  # an idle connection may have broken, unnoticed
                        continue
                    is_well = isinstance(error, _HEALTHY)
                    self._keep_error(error, self._clock() - began_at)
                    raise
                failed = answer.error if isinstance(answer, Filled) else None
                self._measure(verb, began_at, failed)
                self._count_bytes(verb, args, answer)
                if isinstance(failed, StoreFull):
                    self._keep_error(failed, 0.0)
                elif self.problem is not None and (not self._is_full or verb == "put"):
                    self.problem = None
                return answer
        finally:
            with self._lock:
                self._in_a_row = 0 if is_well else self._in_a_row + 1
                self._probe_at = self._clock() + self._open_s

    def _check_breaker(self) -> None:
        """Raises a StoreError while the breaker is open, unless this call is the next probe."""
        with self._lock:
            if self.is_open and not self._is_quick:
                if self._clock() < self._probe_at:
                    raise self._refusal(
                        f"{self.label} failed {self._in_a_row} times in a row;"
                        f" it is tried every {self._open_s:g} s",
                        remedy=self._remedy,
                    )
                self._probe_at = math.inf  # no other probe before this one has ended

    def _keep_error(self, error: StoreError, took_s: float) -> None:
        is_lasting = isinstance(error, StoreTimeout | StoreDenied)
        self._is_quick = not is_lasting and took_s < _QUICK_S
        self._refusal = StoreDenied if isinstance(error, StoreDenied) else StoreUnavailable
        self._remedy = error.remedy
        is_full = isinstance(error, StoreFull)
        if is_full or not isinstance(error, _HEALTHY):
            self.problem = str(error)
            self._is_full = is_full

    def _measure(self, verb: str, began_at: float, error: StoreError | None) -> None:
        outcome = "ok" if error is None else type(error).__name__
        self._metrics.store_calls.labels(verb, outcome).inc()
        self._metrics.store_seconds.labels(verb).observe(self._clock() - began_at)

    def _count_bytes(self, verb: str, args: tuple[object, ...], answer: object) -> None:
        slots = args[1] if len(args) > 1 else None
        if isinstance(answer, Filled):
            num_bytes = answer.num_bytes
        elif isinstance(answer, Ticket) and isinstance(args[0], ValueBatch):
            num_bytes = args[0].num_bytes
        elif isinstance(slots, Slots) and isinstance(answer, int):
            num_bytes = sum(slots.sizes[:answer])
        else:
            return
        self._metrics.bytes.labels(_DIRECTION[verb]).inc(num_bytes)


def problem_of(store: Store) -> str | None:
    """Returns `GuardedStore.problem` of a store, or of what it wraps; None without a guard."""
    while isinstance(store, WrapperStore):
        if isinstance(store, GuardedStore):
            return store.problem
        store = store.wrapped
    return None
