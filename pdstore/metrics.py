"""Metrics: counters and histograms of one engine process; each miss and drop has a reason."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily

from pdstore.outcome import Direction, Reason

_SECONDS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The counters, gauges and histograms of pdstore, in `registry` or in a new one.

    A signal handler may call the methods that count: the client library's locks are not reentrant,
    so a count that finds another under way is left for that one to do.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._codes: list[Callable[[], Mapping[str, int]]] = []
        self._pending: collections.deque[Callable[[], None]] = collections.deque()
        self._counting = threading.Lock()  # never waited for
        self.tokens = self._counter("tokens", "Tokens matched in the pool, loaded, saved", "verb")
        self.bytes = self._counter("bytes", "Bytes to and from the store", "direction")
        self.jobs = self._counter("jobs", "Jobs ended, by outcome", "direction", "outcome")
        self.misses = self._counter("misses", "Lookups and loads cut short, by reason", "reason")
        self.drops = self._counter("drops", "Saves not made or not finished, by reason", "reason")
        self.store_calls = self._counter("store_calls", "Calls of the store", "verb", "outcome")
        self.store_seconds = self._seconds("store_seconds", "Time of a store call", "verb")
        self.job_seconds = self._seconds("job_seconds", "Time of a job", "direction")
        self.handoff_wait_seconds = self._seconds(
            "handoff_wait_seconds", "From D's lookup to P's marker"
        )
        self.exposed_seconds = self._seconds(
            "exposed_seconds", "From a request's arrival to its loaded KV being in place"
        )
        self.jobs_alive = self._gauge("jobs_alive", "Jobs that wait or run")
        self.hung_calls = self._gauge("hung_store_calls", "Store calls that outlived their job")
        self.slots_lent = self._gauge("slots_lent", "Staging slots in use")

    def add_codes(self, codes: Callable[[], Mapping[str, int]]) -> None:
        """Shows a store's error codes too; those of several stores are added up."""
        if not self._codes:
            self.registry.register(self)
        self._codes.append(codes)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the stores' error codes as they are now; the registry calls it."""
        family = CounterMetricFamily(
            "pdstore_store_codes", "Error codes of the store's library", labels=["code"]
        )
        total: collections.Counter[str] = collections.Counter()
        for codes in self._codes:
            total.update(codes())
        for code, count in sorted(total.items()):
            family.add_metric([code], count)
        yield family

    def miss(self, reason: Reason) -> None:
        """Counts a lookup or a load that was cut short."""
        self._count(lambda: self.misses.labels(reason.value).inc())

    def drop(self, reason: Reason) -> None:
        """Counts a save that was not made or not finished."""
        self._count(lambda: self.drops.labels(reason.value).inc())

    def lookup_ended(self, num_tokens: int, reason: Reason | None) -> None:
        """Counts a lookup's matched tokens, and why they are not the whole prompt."""
        self._count(lambda: self.tokens.labels("matched").inc(num_tokens))
        if reason is not None:
            self.miss(reason)

    def job_ended(self, direction: Direction, reason: Reason | None, seconds: float) -> None:
        """Counts a job with its time, and why it did less than all."""
        outcome = reason.value if reason else "ok"
        self._count(lambda: self.jobs.labels(direction.value, outcome).inc())
        self._count(lambda: self.job_seconds.labels(direction.value).observe(seconds))
        if reason is not None:
            (self.miss if direction is Direction.LOAD else self.drop)(reason)

    def total(self) -> float:
        """The sum of all counters: 0 as long as pdstore did nothing."""
        return sum(
            sample.value
            for metric in self.registry.collect()
            if metric.type == "counter"
            for sample in metric.samples
            if sample.name.endswith("_total")
        )

    def _count(self, count: Callable[[], None]) -> None:
        """Does this count, and those that arrive meanwhile, unless another call is doing so."""
        self._pending.append(count)
        while self._pending and self._counting.acquire(blocking=False):
            try:
                while self._pending:
                    self._pending.popleft()()
            finally:
                self._counting.release()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdstore_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pdstore_{name}", text, registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"pdstore_{name}", text, labels, buckets=_SECONDS, registry=self.registry)
