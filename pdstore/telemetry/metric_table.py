"""The metrics by name: the one table that code, documents, dashboards and tests share."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdstore.outcome import Direction, Reason

DIRECTIONS = tuple(direction.value for direction in Direction)
REASONS = tuple(reason.value for reason in Reason)
VERBS = ("match", "get", "put", "remove", "clear")
WAYS = ("load", "compute", "both")
SECONDS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Upper bounds of the histograms' buckets."""


class Kind(enum.Enum):
    """Prometheus' type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds


class Across(enum.Enum):
    """The rule that makes one number of the gauges of an instance's processes."""

    SUM = "sum"
    MAX = "max"  # for gauges of the store, which all of them see alike


@dataclass(frozen=True)
class Metric:
    """One metric.

    name: without "pdstore_" in front, and without "_total" behind a counter.
    text: for the documents and for Prometheus.
    labels: for each, the values that are shown from the start; empty if they are not known.
    """

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    across: Across = Across.SUM

    @property
    def shown_name(self) -> str:
        """The name on a page of metrics."""
        return f"pdstore_{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


def _metric(
    kind: Kind, name: str, text: str, across: Across = Across.SUM, **labels: Sequence[str]
) -> Metric:
    return Metric(name, kind, text, labels, across)


_counter = partial(_metric, Kind.COUNTER)
_seconds = partial(_metric, Kind.HISTOGRAM)
_gauge = partial(_metric, Kind.GAUGE)
_of_store = partial(_gauge, across=Across.MAX)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _of_store(
            "info",
            "1; the labels name the instance",
            version=(),
            format=(),
            role=(),
            namespace=(),
            store=(),
        ),
        _counter(
            "tokens",
            "tokens of prompts looked up, found in the pool, loaded, saved; each once",
            verb=("requested", "matched", "loaded", "saved"),
        ),
        _counter("bytes", "bytes to and from the store", direction=DIRECTIONS),
        _counter("jobs", "jobs ended", direction=DIRECTIONS, outcome=("ok", *REASONS)),
        _counter("misses", "lookups and loads that brought less than was asked", reason=REASONS),
        _counter("drops", "saves not made or not finished", reason=REASONS),
        _counter(
            "store_calls",
            "calls of the store; an outcome is `ok` or an error's class",
            verb=VERBS,
            outcome=("ok",),
        ),
        _counter(
            "store_codes",
            "error codes of the store's library; faults by `faulty+`",
            code=(),
        ),
        _counter("store_evictions", "values that the store evicted, where it tells"),
        _seconds("store_seconds", "time of a store call", verb=VERBS),
        _seconds("job_seconds", "time of a job, with its wait in the queue", direction=DIRECTIONS),
        _seconds("handoff_wait_seconds", "from D's lookup to P's marker or to the deadline"),
        _seconds("exposed_seconds", "from a request's arrival to its loaded KV being in place"),
        _counter("decisions", "prompts by what was decided for what the pool had", way=WAYS),
        _gauge("jobs_alive", "jobs that wait or run"),
        _gauge("queue_jobs", "jobs that no worker has begun", direction=DIRECTIONS),
        _gauge("queue_bytes", "bytes of the jobs that no worker has begun", direction=DIRECTIONS),
        _gauge("hung_store_calls", "store calls that outlived their job; over two refuse new jobs"),
        _gauge("slots", "staging slots in all; 0 where values bypass staging"),
        _gauge("slots_lent", "staging slots in use"),
        _of_store("breaker_open", "1 while calls fail at once because the store failed"),
        _of_store("store_capacity_bytes", "bytes that the store may hold, where it tells"),
        _of_store(
            "store_used_bytes", "bytes that the store holds, where it tells; asked every 15 s"
        ),
    )
}
"""Every metric, by its name in this table, which is also its attribute of `Metrics`."""
