"""Shows pdstore's metrics on vLLM's /metrics page; processes send them with each step."""

from __future__ import annotations

import functools
import threading
import uuid
from collections import defaultdict
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

GAUGES = "gauges"


class PDStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of the metrics over some steps and processes, by metric and label values.

    A counter's change is a number, and a histogram's a list of observations. "gauges" has the last
    values of all gauges: for each connector, a dictionary by metric and label values.
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
            self.data[key] = self.data[key] | change  # connectors have names of their own
        else:
            self.data[key] = self.data[key] + change

    def reduce(self) -> dict[str, int | float]:
        """Returns the numbers for vLLM's log line: counts, and the mean of each histogram."""
        found: dict[str, int | float] = {}
        for key, change in self.data.items():
            words = key.replace("|", " ")
            if isinstance(change, list):
                found[f"{words} (mean)"] = round(sum(change) / len(change), 4)
            elif key != GAUGES:
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

    Decision: a metric that changes is noted at once. Without such notes, each step would have to
    compare all 540 samples of the registry, which takes milliseconds. A step changes only a few.
    But all gauges are sent with each step, which takes microseconds: vLLM hands a step's stats to
    one of its API servers, which knows no earlier ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new = PDStoreStats()
        self._gauges: dict[str, Callable[[], float]] = {}  # by key
        self._name = uuid.uuid4().hex[:8]  # a process may have several, and hosts equal pids
        kept.ValueClass = kept.MutexValue  # else vLLM's PROMETHEUS_MULTIPROC_DIR has them, too
        super().__init__()

    def pop(self) -> PDStoreStats:
        """Returns the changes since the last call, and all gauges. Every step calls it."""
        self.refresh()
        with self._lock:
            new, self._new = self._new, PDStoreStats()
        new.add(GAUGES, {self._name: {key: read() for key, read in list(self._gauges.items())}})
        return new

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
        self._children: dict[tuple[int, str], Any] = {}
        self._metrics = {
            metric.name: self._shown(metric, metric_types[TYPES[metric.kind]], labelnames)
            for metric in METRICS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, change in transfer_stats_data.items():
            if key == GAUGES:
                self._set_gauges(change, engine_idx)
            elif isinstance(change, list):
                for seconds in change:
                    self._child(key, engine_idx).observe(seconds)
            else:
                self._child(key, engine_idx).inc(change)

    def _set_gauges(self, by_connector: dict[str, dict[str, float]], engine_idx: int) -> None:
        """Combines the gauges of all connectors of an instance, in its scheduler and workers.

        Values of earlier steps are not used, because another API server may have later ones.
        """
        values: dict[str, list[float]] = defaultdict(list)
        for gauges in by_connector.values():
            for key, value in gauges.items():
                values[key].append(value)
        for key, several in values.items():
            across = METRICS[key.partition("|")[0]].across
            combined = sum(several) if across is Across.SUM else max(several)
            self._child(key, engine_idx).set(combined)

    def _child(self, key: str, engine_idx: int) -> Any:
        if (child := self._children.get((engine_idx, key))) is None:
            name, *values = key.split("|")
            child = self._metrics[name].labels(*values, *self.per_engine_labelvalues[engine_idx])
            self._children[engine_idx, key] = child
        return child

    def _shown(self, metric: Metric, kind: Any, labelnames: list[str]) -> Any:
        """Makes one metric, with the label values that are known from the start."""
        more: dict[str, Any] = {"buckets": SECONDS} if metric.kind is Kind.HISTOGRAM else {}
        if metric.kind is Kind.GAUGE:
            more["multiprocess_mode"] = "mostrecent"  # as vLLM's: one series for all API servers
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
