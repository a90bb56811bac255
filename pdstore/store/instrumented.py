"""Instrumented: counts a store's calls, seconds and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdstore.errors import StoreError
from pdstore.metrics import Counting, Metrics, Timing
from pdstore.native.arena import Filled, Taken
from pdstore.store.base import Slots, Store
from pdstore.store.wrappers import A, CallWrapper, R

_DIRECTION = {"get": "load", "put": "save"}


class Instrumented(CallWrapper):
    """Counts calls by verb and outcome, their seconds, and the bytes of what was got and put."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._kept: dict[tuple[str, str], tuple[Counting, Timing]] = {}

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

    def _counters(self, verb: str, outcome: str) -> tuple[Counting, Timing]:
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
