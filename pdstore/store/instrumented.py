"""Instrumented: counts a store's calls, seconds and bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from pdstore.errors import StoreError
from pdstore.metrics import Metrics
from pdstore.store.base import Slots, Store
from pdstore.store.in_place import Loan, Reservation
from pdstore.store.wrappers import A, CallWrapper, R

_DIRECTION = {"get": "load", "put": "save"}


class Instrumented(CallWrapper):
    """Counts calls by verb and outcome, their seconds, and the bytes of what was got and put."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics

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
            self._metrics.store_calls.labels(verb, outcome).inc()
            self._metrics.store_seconds.labels(verb).observe(time.monotonic() - start)

    def _count_bytes(self, direction: str, args: tuple[object, ...], answer: object) -> None:
        first, second, *_ = args
        if isinstance(second, Slots) and isinstance(answer, int):
            sizes = second.sizes[:answer]
        elif isinstance(first, Reservation) and isinstance(answer, int):
            sizes = first.places.sizes[:answer]
        elif isinstance(answer, Loan):
            sizes = answer.places.sizes
        else:
            return
        self._metrics.bytes.labels(direction).inc(sum(sizes))
