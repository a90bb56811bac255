"""Instrumented: counts a store's calls, seconds and bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from pdstore.errors import StoreError
from pdstore.metrics import Counting, Metrics, Timing
from pdstore.store.base import Slots, Store
from pdstore.store.in_place import Filled, Loan, Reservation, Taken
from pdstore.store.wrappers import A, CallWrapper, R

_DIRECTION = {"get": "load", "put": "save"}


class Instrumented(CallWrapper):
    """Counts calls by verb and outcome, their seconds, and the bytes of what was got and put."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._kept: dict[tuple[str, str], tuple[Counting, Timing]] = {}

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        with self._measured(verb):
            answer = call(*args, **kwargs)
        if verb in _DIRECTION:
            self._count_bytes(_DIRECTION[verb], args, answer)
        return answer

    @contextlib.contextmanager
    def _measured(self, verb: str) -> Iterator[None]:
        start, outcome = time.monotonic(), "ok"
        try:
            yield
        except StoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            calls, seconds = self._counters(verb, outcome)
            calls.inc()
            seconds.observe(time.monotonic() - start)

    def _counters(self, verb: str, outcome: str) -> tuple[Counting, Timing]:
        """Keeps the labelled metrics: to look them up takes longer than to count."""
        kept = self._kept.get((verb, outcome))
        if kept is None:
            metrics = self._metrics
            kept = metrics.store_calls.labels(verb, outcome), metrics.store_seconds.labels(verb)
            self._kept[verb, outcome] = kept
        return kept

    def _count_bytes(self, direction: str, args: tuple[object, ...], answer: object) -> None:
        first, second = (*args, None, None)[:2]
        if isinstance(second, Slots) and isinstance(answer, int):
            num_bytes = sum(second.sizes[:answer])
        elif isinstance(first, Reservation) and isinstance(answer, int):
            num_bytes = sum(first.places.sizes[:answer])
        elif isinstance(answer, Filled):
            num_bytes = answer.num_bytes
        elif isinstance(answer, Taken):
            num_bytes = sum(answer.loan.places.sizes)
        elif isinstance(answer, Loan):
            num_bytes = sum(answer.places.sizes)
        else:
            return
        self._metrics.bytes.labels(direction).inc(num_bytes)
