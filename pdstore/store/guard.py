"""GuardedStore: the wrapper that engines use, with a breaker, one retry and metrics.

The breaker is our own. With the library pybreaker, this file would be 9 lines longer. The library
also holds a lock during each call: four calls of 50 ms on four threads took 226 ms.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from pdstore.errors import (
    BadValue,
    Direction,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    ValueRefused,
)
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.metrics import CallMetrics, Metrics
from pdstore.store.base import Store, num_done_of
from pdstore.store.transfer import Moved
from pdstore.store.wrappers import HookedStore, WrapperStore
from pdstore.threads import Ticker

A = TypeVar("A")

# Errors that do not count as failures of the store.
_HEALTHY = (BadValue, StoreFull, StoreClosed, ValueRefused)
_ABOUT_PUTS = (StoreFull, ValueRefused)  # `problem` keeps these until a put succeeds
_QUICK_S = 0.02
_PROBE_TIMEOUT_S = 0.1  # a probe without an answer after this time shows that the store hangs
OPEN_S = 1.0
"""Seconds between two probes of an open breaker: a short time, as a probe is only one call."""
_DIRECTION = {"get": Direction.LOAD, "put": Direction.SAVE}


class GuardedStore(HookedStore):
    """Measures each call, retries a call one time if the store is unavailable, and has a breaker.

    It counts calls by verb and outcome, their seconds, and the bytes that were got and put. The
    breaker opens after `failures` failed calls in a row, or after one that timed out: no other call
    should wait as long. While it is open, calls raise StoreUnavailable at once, or StoreDenied if
    the last call was denied. A thread, which the first opening starts, searches for the key at
    which a call failed last: at once, and `open_s` after each failed search. The first answer
    closes the breaker. So no caller waits for a store that may still hang, and an idle instance
    notices that its store is back. If the last failure came quickly, as from a replica, callers'
    calls are made as well. A search that takes longer than a tenth of a second opens the breaker.

    problem: the message of the store's last failure, or of its last StoreFull or ValueRefused; None
      if all is well. The next successful call clears a failure; only the next successful put clears
      a StoreFull or a ValueRefused.
    lasting_problem: a problem that no call shows and none clears (`Room.problem`), or None.
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
        self._calls = CallMetrics(metrics)
        self._failures = failures
        self._open_s = open_s
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._is_open = False
        self._prober: Ticker | None = None
        self._is_doubted = False
        self._probed_at: float | None = None  # while a probe runs: when it began
        self._probe_key = POOL_ID_KEY
        self._is_closed = False
        self.problem: str | None = None
        self.lasting_problem: str | None = None
        self._is_full = False
        self._is_quick = False
        self._refusal: type[StoreError] = StoreUnavailable
        self._remedy = ""

    @property
    def is_open(self) -> bool:
        """True after `failures` failed calls in a row, or a timeout, until a call does not fail.

        Also true while a probe has no answer yet. Does no I/O.
        """
        return self._is_open or self._is_probe_late

    @property
    def _is_probe_late(self) -> bool:
        probed_at = self._probed_at
        return probed_at is not None and self._clock() - probed_at > _PROBE_TIMEOUT_S

    def count_in(self, calls: CallMetrics) -> None:
        """Counts all later calls in these metrics, as those of one of several tiers."""
        self._calls = calls

    def doubt(self) -> None:
        """Starts a probe because calls of other processes timed out. Any thread may call it.

        Does no I/O itself. Each process of an instance has a breaker of its own.
        """
        with self._lock:
            if self._probed_at is None and not (self._is_open or self._is_doubted):
                self._is_doubted = True
                self._wake_prober()

    def around(self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]) -> Moved[A]:
        if self._pid != os.getpid() or not (keys or verb == "clear"):
            return call()  # by a forked child, or without I/O
        if self._is_probe_late or (self._is_open and not self._is_quick):
            self._refuse()
        return self._make(verb, keys, call)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            prober = self._prober
        if prober is not None:
            prober.stop(0.0)  # its call may hang, and ends with the wrapped store
        super().close()

    def _make(self, verb: str, keys: Sequence[BlockKey], call: Callable[[], Moved[A]]) -> Moved[A]:
        """Makes a call, whatever the breaker says; the call's outcome opens or closes it."""
        failure: StoreError | None = None  # a ValueError, for instance, is none of the store
        is_retry = False
        try:
            while True:
                began_at = self._clock()
                try:
                    moved = call()
                except StoreError as error:
                    self._measure(verb, began_at, error)
                    if isinstance(error, StoreUnavailable) and not (is_retry or self._is_open):
                        is_retry = True  # an idle connection may have broken, unnoticed
                        continue
                    if not isinstance(error, _HEALTHY):
                        failure = error
                        self._probe_key = _key_of(error, keys)
                    self._keep_error(error, self._clock() - began_at)
                    raise
                self._measure(verb, began_at, moved.error)
                if moved.num_bytes:
                    self._calls.add_bytes(_DIRECTION[verb], moved.num_bytes)
                if isinstance(moved.error, StoreFull):
                    self._keep_error(moved.error, 0.0)
                elif self.problem is not None and (not self._is_full or verb == "put"):
                    self.problem = None
                return moved
        finally:
            self._note(failure)

    def _note(self, failure: StoreError | None) -> None:
        """Opens or closes the breaker after a call, which may have failed."""
        with self._lock:
            was_open = self._is_open
            self._in_a_row = 0 if failure is None else self._in_a_row + 1
            self._is_open = self._in_a_row >= self._failures or (
                failure is not None and (was_open or isinstance(failure, StoreTimeout))
            )
            if self._is_open and not was_open:
                self._wake_prober()

    def _wake_prober(self) -> None:
        """Starts or wakes the thread that probes. The caller holds the lock."""
        if self._prober is not None:
            self._prober.wake()
        elif not self._is_closed:
            with contextlib.suppress(
                RuntimeError
            ):  # no thread can start now; the next refused call tries again
                self._prober = Ticker("pdstore-breaker", self._probe)

    def _probe(self) -> float | None:
        """Searches for one key while the breaker is open; returns the seconds until the next time.

        The seconds count from the end of a call, also of one that was slow or hung.
        """
        if not (self._is_open or self._is_doubted) or self._is_closed:
            return None
        self._probed_at = self._clock()
        try:
            keys = [self._probe_key]
            self._make("match", keys, lambda: Moved(self.wrapped.match(keys)))
        except StoreError:
            pass
        finally:
            self._is_doubted = False
            self._probed_at = None
        return self._open_s if self._is_open else None

    def _refuse(self) -> NoReturn:
        """Raises the StoreError of a call that is not made, because the breaker is open."""
        with self._lock:
            if self._prober is None:
                self._wake_prober()
        count = self._in_a_row
        what = f"failed {count} times in a row" if count > 1 else "did not answer in time"
        message = f"{self.label} {what}; it is tried every {self._open_s:g} s"
        raise self._refusal(message, remedy=self._remedy)

    def _keep_error(self, error: StoreError, took_s: float) -> None:
        is_lasting = isinstance(error, StoreTimeout | StoreDenied)
        self._is_quick = not is_lasting and took_s < _QUICK_S
        self._refusal = StoreDenied if isinstance(error, StoreDenied) else StoreUnavailable
        self._remedy = error.remedy
        is_full = isinstance(error, _ABOUT_PUTS)
        if is_full or not isinstance(error, _HEALTHY):
            self.problem = str(error)
            self._is_full = is_full

    def _measure(self, verb: str, began_at: float, error: StoreError | None) -> None:
        outcome = "ok" if error is None else type(error).__name__
        self._calls.call_ended(verb, outcome, self._clock() - began_at)


def _key_of(error: StoreError, keys: Sequence[BlockKey]) -> BlockKey:
    """Returns the key at which a call failed; the pool's id if none is known.

    In a cluster, another key may be on a server that works.
    """
    done = num_done_of(error, keys)
    return BlockKey(str(keys[done])) if done < len(keys) else POOL_ID_KEY


def guard_of(store: Store) -> GuardedStore | None:
    """Returns a store, or the first store that it wraps, that is a GuardedStore; else None."""
    while isinstance(store, WrapperStore):
        if isinstance(store, GuardedStore):
            return store
        store = store.wrapped
    return None


def problem_of(store: Store) -> str | None:
    """Returns the problem of a store, or of what it wraps, by its guard; None without a guard."""
    guard = guard_of(store)
    return guard.problem or guard.lasting_problem if guard is not None else None
