"""The engine's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.scheduler import Scheduler
from pdstore import Metrics


class Counters:
    """The engine's own counters, in one registry with pdstore's, which stay 0 while it is off."""

    def __init__(self) -> None:
        self.pdstore = Metrics()
        self.registry = self.pdstore.registry
        self.computed = self._counter("computed_tokens", "Tokens fed to the model")
        self.generated = self._counter("generated_tokens", "Tokens answered")
        self._requests = Gauge(
            "mini_engine_requests", "Requests, by state", ["state"], registry=self.registry
        )
        self._free_blocks = Gauge(
            "mini_engine_free_blocks", "Free blocks of the KV cache", registry=self.registry
        )
        self._states = Gauge(
            "mini_engine_states", "States that requests hold (--state)", registry=self.registry
        )

    def show(self, scheduler: Scheduler, cache: PagedCache) -> None:
        """Sets the gauges; called once a turn."""
        for state in ("waiting", "loading", "running", "leaving"):
            self._requests.labels(state).set(len(getattr(scheduler, state)))
        self._free_blocks.set(cache.num_free)
        self._states.set(0 if cache.states is None else cache.states.num_used)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"mini_engine_{name}", text, registry=self.registry)
