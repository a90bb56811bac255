"""pdstore's metrics on vLLM's /metrics page, sent with each step from each process."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pdstore.metrics import Metrics

_COUNTERS, _SECONDS, _GAUGES = "counters", "seconds", "gauges"
_GAUGES_EVERY_S = 0.1


class StepMetrics(Metrics):
    """Metrics that also accumulate their changes since the last step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new = PDStoreStats()
        self._shown: dict[str, float] = {}
        self._gauges_at = 0.0
        super().__init__()

    def take(self) -> PDStoreStats | None:
        """Returns the changes since the last call, or None. Cheap: vLLM calls it in every step."""
        new: PDStoreStats | None = None
        if not self._new.is_empty():
            with self._lock:
                new, self._new = self._new, PDStoreStats()
        now = time.monotonic()
        if new is None and now < self._gauges_at:
            return None
        self._gauges_at = now + _GAUGES_EVERY_S
        new = new or PDStoreStats()
        for gauge in (self.hung_calls, self.slots_lent, self.jobs_alive):
            value = next(iter(gauge.collect())).samples[0].value
            if self._shown.get(gauge._name, 0.0) != value:
                self._shown[gauge._name] = new.data[_GAUGES][gauge._name] = value
        return None if new.is_empty() else new

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return _counter_class(self)(f"pdstore_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        whole = super()._seconds(name, text, *labels)
        self.registry.unregister(whole)
        kwargs = {"buckets": whole._kwargs["buckets"], "registry": self.registry}
        return _histogram_class(self)(f"pdstore_{name}", text, labels, **kwargs)

    def note_count(self, key: str, amount: float) -> None:
        """Adds to a counter's change."""
        with self._lock:
            counters = self._new.data[_COUNTERS]
            counters[key] = counters.get(key, 0.0) + amount

    def note_seconds(self, key: str, amount: float) -> None:
        """Adds an observation of a histogram."""
        with self._lock:
            self._new.data[_SECONDS].setdefault(key, []).append(amount)


def _counter_class(metrics: StepMetrics) -> type[Counter]:
    class Noted(Counter):
        def inc(self, amount: float = 1, exemplar: Any = None) -> None:
            super().inc(amount, exemplar)
            metrics.note_count(_key(self), amount)

    return Noted


def _histogram_class(metrics: StepMetrics) -> type[Histogram]:
    class Noted(Histogram):
        def observe(self, amount: float, exemplar: Any = None) -> None:
            super().observe(amount, exemplar)
            metrics.note_seconds(_key(self), amount)

    return Noted


def _key(metric: Any) -> str:
    """A metric's name and label values as one text, which travels between processes."""
    return "|".join((metric._name, *metric._labelvalues))


class PDStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of the metrics over some steps and processes."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        for kind in (_COUNTERS, _SECONDS, _GAUGES):
            self.data.setdefault(kind, {})

    def reset(self) -> None:
        self.data = PDStoreStats().data

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> PDStoreStats:
        for key, amount in other.data[_COUNTERS].items():
            self.data[_COUNTERS][key] = self.data[_COUNTERS].get(key, 0.0) + amount
        for key, amounts in other.data[_SECONDS].items():
            self.data[_SECONDS].setdefault(key, []).extend(amounts)
        self.data[_GAUGES].update(other.data[_GAUGES])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the numbers of vLLM's log line: counts, and the mean of each histogram."""
        found = {_words(key): round(amount) for key, amount in self.data[_COUNTERS].items()}
        means = {
            f"{_words(key)} (mean)": round(sum(amounts) / len(amounts), 4)
            for key, amounts in self.data[_SECONDS].items()
        }
        return {**found, **means}


def _words(key: str) -> str:
    return key.removeprefix("pdstore_").replace("|", " ")


class PDStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics in the API server, under their usual names."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for one in vars(Metrics()).values():
            if not isinstance(one, (Counter, Gauge, Histogram)):
                continue
            kind = next(k for k in (Counter, Gauge, Histogram) if isinstance(one, k))
            extra = {"buckets": one._kwargs["buckets"]} if kind is Histogram else {}
            self._metrics[one._name] = metric_types[kind](
                name=one._name,
                documentation=one._documentation,
                labelnames=[*one._labelnames, *labelnames],
                **extra,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        changes = PDStoreStats(transfer_stats_data).data
        for key, amount in changes[_COUNTERS].items():
            self._child(key, engine_idx).inc(amount)
        for key, amounts in changes[_SECONDS].items():
            child = self._child(key, engine_idx)
            for amount in amounts:
                child.observe(amount)
        for key, value in changes[_GAUGES].items():
            self._child(key, engine_idx).set(value)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, *values = key.split("|")
        return self._metrics[name].labels(*values, *self.per_engine_labelvalues[engine_idx])
