"""pdstore's metrics on vLLM's /metrics page, sent with each step from each process."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pdstore.metrics import M, Metrics, known_labels
from pdstore.telemetry.metric_table import METRICS, SECONDS, Across, Kind, Metric

_COUNTERS, _SECONDS, _GAUGES = "counters", "seconds", "gauges"
_GAUGES_EVERY_S = 0.1
_TYPES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


class StepMetrics(Metrics):
    """Metrics that also accumulate their changes since the last step.

    Decision: each change is noted when it is made. To collect the registry's samples in each step
    and send their differences would need no such notes, but costs milliseconds a step: there are
    540 of them, of which a step changes a few.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new = PDStoreStats()
        self._gauges: dict[str, Callable[[], float]] = {}  # by key
        self._sent_gauges: dict[str, float] = {}
        self._gauges_at = 0.0
        super().__init__()

    def pop(self) -> PDStoreStats | None:
        """Returns the changes since the last call, or None. Cheap: vLLM calls it in every step."""
        new = PDStoreStats()
        if not self._new.is_empty():
            with self._lock:
                new, self._new = self._new, new
        now = time.monotonic()
        if now >= self._gauges_at:
            self._gauges_at = now + _GAUGES_EVERY_S
            self.refresh()
            new.data[_GAUGES] = self._changed_gauges()
        return None if new.is_empty() else new

    def count(self, key: str, amount: float) -> None:
        """Adds to a counter's change."""
        with self._lock:
            counters = self._new.data[_COUNTERS]
            counters[key] = counters.get(key, 0.0) + amount

    def observe(self, key: str, seconds: float) -> None:
        """Adds an observation of a histogram."""
        with self._lock:
            self._new.data[_SECONDS].setdefault(key, []).append(seconds)

    def show(self, key: str, read: Callable[[], float]) -> None:
        """Reads a gauge by this function from now on."""
        self._gauges[key] = read

    def _made(self, kind: type[M], name: str) -> M:
        return cast("M", _Noted(super()._made(kind, name), name, self))

    def _changed_gauges(self) -> dict[str, float]:
        """Returns the gauges that changed since the last call, by key with this process in it."""
        now = {key: read() for key, read in list(self._gauges.items())}
        sent = self._sent_gauges
        changed = {key: value for key, value in now.items() if sent.get(key, 0.0) != value}
        sent |= changed
        process = os.getpid()
        return {f"{process}@{key}": value for key, value in changed.items()}


class _Noted:
    """A metric, or one of its label values, whose changes a StepMetrics gets too.

    shown: the metric of the client library.
    """

    def __init__(self, shown: Any, key: str, step: StepMetrics) -> None:
        self._shown = shown
        self._key = key
        self._step = step
        self._children: dict[tuple[str, ...], _Noted] = {}

    def labels(self, *values: str) -> _Noted:
        if (child := self._children.get(values)) is None:
            key = _key_of(self._key, values)
            child = self._children[values] = _Noted(self._shown.labels(*values), key, self._step)
        return child

    def inc(self, amount: float = 1) -> None:
        self._shown.inc(amount)
        if amount:
            self._step.count(self._key, amount)

    def observe(self, amount: float) -> None:
        self._shown.observe(amount)
        self._step.observe(self._key, amount)

    def set(self, value: float) -> None:
        self._shown.set(value)
        self._step.show(self._key, lambda: value)

    def set_function(self, f: Callable[[], float]) -> None:
        self._shown.set_function(f)
        self._step.show(self._key, f)


def _key_of(name: str, values: Any) -> str:
    """A metric's name and label values as one text, which travels between processes."""
    return "|".join((name, *(value.replace("|", "/") for value in values)))


class PDStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of the metrics over some steps and processes; a gauge's key names its process."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))
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


def stats_of(given: KVConnectorStats | None, connector: str) -> PDStoreStats | None:
    """Returns the stats of one connector, by its class's name; MultiConnector's hold several."""
    if given is None or isinstance(given, PDStoreStats):
        return given
    found = given.data.get(connector)
    return found if isinstance(found, PDStoreStats) else None


def _words(key: str) -> str:
    return key.replace("|", " ")


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
        self._gauges: dict[tuple[int, str], dict[str, float]] = {}  # by process
        self._metrics = {
            metric.name: self._shown(metric, metric_types[_TYPES[metric.kind]], labelnames)
            for metric in METRICS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        changes = PDStoreStats(transfer_stats_data).data
        for key, amount in changes[_COUNTERS].items():
            self._child(key, engine_idx).inc(amount)
        for key, amounts in changes[_SECONDS].items():
            child = self._child(key, engine_idx)
            for amount in amounts:
                child.observe(amount)
        for key, value in changes[_GAUGES].items():
            self._set_gauge(key, value, engine_idx)

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

    def _set_gauge(self, key: str, value: float, engine_idx: int) -> None:
        process, _, shown = key.partition("@")
        of_processes = self._gauges.setdefault((engine_idx, shown), {})
        of_processes[process] = value
        combine = sum if METRICS[shown.partition("|")[0]].across is Across.SUM else max
        self._child(shown, engine_idx).set(combine(of_processes.values()))

    def _child(self, key: str, engine_idx: int) -> Any:
        name, *values = key.split("|")
        return self._metrics[name].labels(*values, *self.per_engine_labelvalues[engine_idx])


class WorkerMetrics:
    """The metrics of an instance's workers, put together on its scheduler side.

    registry: has them under their usual names.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self.registry) for kind in _TYPES.values()}
        nobody = SimpleNamespace(kv_transfer_config=None)
        self._metrics = PDStorePromMetrics(nobody, types, ["engine"], {0: ["0"]})

    def add(self, stats: PDStoreStats) -> None:
        """Adds the changes of some steps."""
        self._metrics.observe(stats.data)

    @property
    def problem(self) -> str | None:
        """The trouble that the workers have with the store; None while all is well."""
        is_open = self.registry.get_sample_value("pdstore_breaker_open", {"engine": "0"})
        return "the store fails, so that calls fail at once for a while" if is_open else None
