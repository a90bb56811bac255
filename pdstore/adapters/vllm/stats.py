"""Shows pdstore's metrics on vLLM's /metrics page; processes send them with each step."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client import values as kept
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pdstore.metrics import (
    METRICS,
    SECONDS,
    TYPES,
    Across,
    Kind,
    Metric,
    Metrics,
    Shown,
    known_labels,
)

_GAUGES_EVERY_S = 0.1


class PDStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of the metrics over some steps and processes, by metric and label values.

    A counter's change is a number, a histogram's a list of observations, and a gauge's the last
    value of each process.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PDStoreStats:
        for key, change in other.data.items():
            self.add(key, change)
        return self

    def add(self, key: str, change: Any) -> None:
        """Adds the change of one metric."""
        if key not in self.data:
            self.data[key] = change
        elif isinstance(change, dict):
            self.data[key] = self.data[key] | change
        else:
            self.data[key] = self.data[key] + change

    def reduce(self) -> dict[str, int | float]:
        """Returns the numbers for vLLM's log line: counts, and the mean of each histogram."""
        found: dict[str, int | float] = {}
        for key, change in self.data.items():
            words = key.replace("|", " ")
            if isinstance(change, list):
                found[f"{words} (mean)"] = round(sum(change) / len(change), 4)
            elif not isinstance(change, dict):
                found[words] = round(change)
        return found


def stats_of(given: KVConnectorStats | None, connector: str) -> PDStoreStats | None:
    """Returns one connector's stats; `given` may be the stats of a MultiConnector."""
    if given is None or isinstance(given, PDStoreStats):
        return given
    found = given.data.get(connector)
    return found if isinstance(found, PDStoreStats) else None


class StepMetrics(Metrics):
    """Metrics that also collect the changes since the last step.

    Decision: each change is recorded when it is made. Without such records, each step would have to
    compare all 540 samples of the registry, which takes milliseconds. A step changes only a few.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new = PDStoreStats()
        self._gauges: dict[str, Callable[[], float]] = {}  # by key
        self._sent_gauges: dict[str, float] = {}
        self._gauges_at = 0.0
        kept.ValueClass = kept.MutexValue  # else vLLM's PROMETHEUS_MULTIPROC_DIR has them, too
        super().__init__()

    def pop(self) -> PDStoreStats | None:
        """Returns the changes since the last call, or None. It is quick: every step calls it."""
        with self._lock:
            new, self._new = self._new, PDStoreStats()
        now = time.monotonic()
        if now >= self._gauges_at:
            self._gauges_at = now + _GAUGES_EVERY_S
            self.refresh()
            for key, read in list(self._gauges.items()):
                value = read()
                if self._sent_gauges.get(key, 0.0) != value:
                    self._sent_gauges[key] = value
                    new.add(key, {str(os.getpid()): value})
        return None if new.is_empty() else new

    def add_change(self, key: str, change: float | list[float]) -> None:
        """Records what was added to a counter, or observed by a histogram."""
        with self._lock:
            self._new.add(key, change)

    def read_gauge(self, key: str, read: Callable[[], float]) -> None:
        """Makes `read` the source of a gauge's value from now on."""
        self._gauges[key] = read

    def _made(self, metric: Metric) -> Shown:
        return _Recorded(super()._made(metric), metric.name, self)


class _Recorded:
    """A metric, or a metric with fixed label values, that records each change in a StepMetrics.

    shown: the Prometheus client library's metric, which is changed as well.
    """

    def __init__(self, shown: Any, key: str, step: StepMetrics) -> None:
        self._shown = shown
        self._key = key
        self._step = step
        self._children: dict[tuple[str, ...], _Recorded] = {}

    def labels(self, *values: str) -> _Recorded:
        if (child := self._children.get(values)) is None:
            key = "|".join((self._key, *(value.replace("|", "/") for value in values)))
            child = _Recorded(self._shown.labels(*values), key, self._step)
            self._children[values] = child
        return child

    def inc(self, amount: float = 1) -> None:
        self._shown.inc(amount)
        if amount:
            self._step.add_change(self._key, amount)

    def observe(self, amount: float) -> None:
        self._shown.observe(amount)
        self._step.add_change(self._key, [amount])

    def set(self, value: float) -> None:
        self._shown.set(value)
        self._step.read_gauge(self._key, lambda: value)

    def set_function(self, f: Callable[[], float]) -> None:
        self._shown.set_function(f)
        self._step.read_gauge(self._key, f)


class PDStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """pdstore's metrics in vLLM's API server, under their usual names."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauges: dict[tuple[int, str], dict[str, float]] = {}  # by process
        self._metrics = {
            metric.name: self._shown(metric, metric_types[TYPES[metric.kind]], labelnames)
            for metric in METRICS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, change in transfer_stats_data.items():
            name, *values = key.split("|")
            metric = self._metrics[name].labels(*values, *self.per_engine_labelvalues[engine_idx])
            if isinstance(change, dict):
                of_processes = self._gauges.setdefault((engine_idx, key), {})
                of_processes.update(change)
                combine = sum if METRICS[name].across is Across.SUM else max
                metric.set(combine(of_processes.values()))
            elif isinstance(change, list):
                for seconds in change:
                    metric.observe(seconds)
            else:
                metric.inc(change)

    def _shown(self, metric: Metric, kind: Any, labelnames: list[str]) -> Any:
        """Makes one metric, with the label values that are known from the start."""
        more = {"buckets": SECONDS} if metric.kind is Kind.HISTOGRAM else {}
        made = kind(
            name=f"pdstore_{metric.name}",
            documentation=metric.text,
            labelnames=[*metric.labels, *labelnames],
            **more,
        )
        for of_engine in self.per_engine_labelvalues.values():
            for values in known_labels(metric) if metric.labels else [()]:
                made.labels(*values, *of_engine)
        return made


class WorkerMetrics(PDStorePromMetrics):
    """The metrics of all workers of an instance, combined on its scheduler side.

    registry: holds these metrics under their usual names.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self.registry) for kind in TYPES.values()}
        super().__init__(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})

    @property
    def problem(self) -> str | None:
        """The trouble that the workers have with the store; None while all is well."""
        is_open = self.registry.get_sample_value("pdstore_breaker_open", {"engine": "0"})
        return "the store failed, so the breaker refuses calls for a while" if is_open else None
