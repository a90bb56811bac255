"""Counters and histograms of one engine process; every miss, drop and failure has a reason."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdstore.types import Direction, Reason

_SECONDS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """What pdstore counts. `registry` is what a /metrics page shows; a new one unless given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.tokens = Counter(
            "pdstore_tokens",
            "Tokens matched in the pool, loaded from it, saved to it",
            ["verb"],
            registry=self.registry,
        )
        self.bytes = Counter(
            "pdstore_bytes",
            "Bytes moved to and from the store",
            ["direction"],
            registry=self.registry,
        )
        self.jobs = Counter(
            "pdstore_jobs",
            "Jobs ended, by outcome",
            ["direction", "outcome"],
            registry=self.registry,
        )
        self.misses = Counter(
            "pdstore_misses",
            "Lookups and loads cut short, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.drops = Counter(
            "pdstore_drops",
            "Saves not made or not finished, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.store_calls = Counter(
            "pdstore_store_calls", "Calls of the store", ["verb", "outcome"], registry=self.registry
        )
        self.store_seconds = Histogram(
            "pdstore_store_seconds",
            "Time of a store call",
            ["verb"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.handoff_wait_seconds = Histogram(
            "pdstore_handoff_wait_seconds",
            "From D's lookup to P's marker",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.job_seconds = Histogram(
            "pdstore_job_seconds",
            "Time of a job",
            ["direction"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.hung_calls = Gauge(
            "pdstore_hung_store_calls",
            "Store calls that outlived their job",
            registry=self.registry,
        )
        self.slots_lent = Gauge(
            "pdstore_slots_lent", "Staging slots in use", registry=self.registry
        )

    def miss(self, reason: Reason) -> None:
        self.misses.labels(reason.value).inc()

    def drop(self, reason: Reason) -> None:
        self.drops.labels(reason.value).inc()

    def job_ended(self, direction: Direction, reason: Reason | None, seconds: float) -> None:
        self.jobs.labels(direction.value, reason.value if reason else "ok").inc()
        self.job_seconds.labels(direction.value).observe(seconds)
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
