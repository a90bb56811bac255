"""The router's own metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest


class Counts:
    """Counters of one router; `text()` is what /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "router_requests", "Answers to clients.", ["status"], registry=self.registry
        )
        self.degraded = Counter(
            "router_degraded",
            "Requests that D had to compute because no P could prefill them.",
            registry=self.registry,
        )
        self.failures = Counter(
            "router_upstream_failures",
            "Calls of an instance that failed; `status` is a 5xx answer.",
            ["role", "reason"],
            registry=self.registry,
        )
        self.disconnects = Counter(
            "router_disconnects", "Clients that left before the end.", registry=self.registry
        )
        self.first_byte = Histogram(
            "router_first_byte_seconds",
            "From the client's request to the first byte of its answer.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
