"""Metrics: the metrics of one engine process; METRICS is the table of all metrics.

Code, documents, dashboards and tests use that table. Each counted miss or drop has a reason.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family

import pdstore
from pdstore.errors import Cause, Direction, Reason
from pdstore.telemetry.reasons import ReasonLog

DIRECTIONS = tuple(direction.value for direction in Direction)
REASONS = tuple(reason.value for reason in Reason)
VERBS = ("match", "get", "put", "remove", "clear")
WAYS = ("load", "compute", "both")
COPIES = ("copied", "not_admitted", "given_up", "lost", "promoted", "wrong")
SECONDS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Upper bounds of the histograms' buckets, in seconds."""


class Kind(enum.Enum):
    """The type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # pdstore has only histograms of seconds


class Across(enum.Enum):
    """The rule that combines a gauge's values in all processes of an instance into one number."""

    SUM = "sum"
    MAX = "max"  # for gauges that are equal in all processes, or known to one alone


@dataclass(frozen=True)
class Metric:
    """One metric.

    name: the metric's name without "pdstore_" before it and a counter's "_total" behind it.
    text: explains the metric, in the documents and to Prometheus.
    labels: for each label, the values that are shown before anything is counted; empty if the
      values are not known in advance.
    """

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    across: Across = Across.SUM

    @property
    def shown_name(self) -> str:
        """The metric's name on a /metrics page."""
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
            "1; the labels describe the instance; `pool` is its pool's id, once it is known",
            **dict.fromkeys(("version", "format", "role", "namespace", "store", "pool"), ()),
        ),
        _counter(
            "tokens",
            "tokens of prompts: looked up, found in the pool, to be loaded by a plan, loaded,"
            " loaded without the draft model's KV, planned and not loaded, saved (by each rank,"
            " and again if lost)",
            verb=("requested", "matched", "promised", "loaded", "cold", "lost", "saved"),
        ),
        _counter(
            "tier_tokens",
            "tokens of prompts that were loaded, by the tier that they were read from; of a store"
            " with several tiers alone",
            tier=(),
        ),
        _counter("bytes", "bytes to and from the store", direction=DIRECTIONS),
        _counter("jobs", "jobs ended", direction=DIRECTIONS, outcome=("ok", *REASONS)),
        _counter("misses", "lookups and loads that brought less than was asked", reason=REASONS),
        _counter("drops", "saves not made or not finished", reason=REASONS),
        _counter(
            "store_calls",
            "calls of the store; the outcome is `ok` or the class of the error",
            verb=VERBS,
            outcome=("ok",),
        ),
        _counter(
            "store_codes",
            "errors by the code from the store's library, and faults that `faulty+` makes",
            code=(),
        ),
        _counter("store_evictions", "values that the store evicted, if it tells"),
        _seconds("store_seconds", "time of a store call", verb=VERBS),
        _seconds("job_seconds", "time of a job, with its wait in the queue", direction=DIRECTIONS),
        _seconds("handoff_wait_seconds", "time from D's lookup to P's marker or the deadline"),
        _seconds("exposed_seconds", "time from a request's arrival to the end of its load"),
        _counter("decisions", "prompts of which the pool had KV, by how to get it", way=WAYS),
        _gauge(
            "compute_seconds_per_token",
            "seconds that the model takes for a token of a prompt, by the prompts of which it"
            " computed 512 tokens or more; 0 before the first of them",
            across=Across.MAX,
        ),
        _gauge("jobs_alive", "jobs that wait or run"),
        _gauge("queue_jobs", "jobs that no worker has begun", direction=DIRECTIONS),
        _gauge("queue_bytes", "bytes of the jobs that no worker has begun", direction=DIRECTIONS),
        _gauge("hung_store_calls", "store calls that outlived their job; 3 stop new jobs"),
        _gauge("slots", "staging slots in total; 0 if values bypass staging"),
        _gauge("slots_lent", "staging slots in use"),
        _of_store("breaker_open", "1 while the breaker refuses store calls"),
        _of_store("store_capacity_bytes", "bytes that the store may hold, if it tells"),
        _of_store("store_used_bytes", "bytes that the store holds, if it tells; asked every 15 s"),
        _counter(
            "tier_calls",
            "calls of a lower tier; the outcome is `ok` or the class of the error",
            tier=(),
            verb=VERBS,
            outcome=("ok",),
        ),
        _seconds("tier_seconds", "time of a call of a lower tier", tier=(), verb=VERBS),
        _counter(
            "tier_bytes",
            "bytes read from a lower tier, and bytes put into it by copies",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter(
            "tier_copies",
            "blocks that were to be copied to a lower tier, by what became of them",
            tier=(),
            outcome=COPIES,
        ),
        _gauge(
            "tier_waiting_bytes", "bytes of the blocks that wait to be copied to a tier", tier=()
        ),
        _of_store("tier_out", "1 while a lower tier is left out until it answers", tier=()),
        _of_store("tier_capacity_bytes", "bytes that a tier may hold, if it tells", tier=()),
        _of_store("tier_used_bytes", "bytes that a tier holds, if it tells", tier=()),
        _counter("tier_evictions", "values that a tier evicted, if it tells", tier=()),
    )
}
"""Every metric by its name. `Metrics` has an attribute of that name."""

Shown: TypeAlias = Any
"""A Counter, Gauge or Histogram of the client library."""

TYPES: Mapping[Kind, Shown] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


class TierState(NamedTuple):
    """The state of one of several tiers, as metrics and pages show it.

    name: the tier's number and the scheme of its URL: `1 file`. The first tier has the number 0.
    label: its URL without secrets and options.
    problem: why the tier is left out now; None if it is not.
    num_waiting_bytes: bytes of the values that wait to be copied to it.
    copies: the number of values by what became of their copies to it; empty for the first tier.
    """

    name: str
    label: str
    problem: str | None = None
    num_waiting_bytes: int = 0
    copies: Mapping[str, int] = {}


def is_first_tier(name: str) -> bool:
    """True for the name of a first tier, as `TierState` has it."""
    return name.startswith("0 ")


class Metrics:
    """The metrics that `METRICS` lists, in `registry` or in a new registry.

    It also logs misses and drops. Any thread may call it, but a signal handler must not, because
    the client library's locks are not reentrant.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._reasons = ReasonLog()
        self._sources: list[Callable[[], None]] = []
        self._breakers: list[Callable[[], bool]] = []
        self._tiers: list[Callable[[], Sequence[TierState]]] = []
        self._sources.append(self._read_tiers)
        self.registry.register(self)  # it is asked first
        self._metrics = {name: self._made(metric) for name, metric in METRICS.items()}
        self.breaker_open.set_function(lambda: any(is_open() for is_open in self._breakers))

    def __getattr__(self, name: str) -> Shown:
        """Returns the Counter, Gauge or Histogram of a name in `METRICS`."""
        if name in METRICS:
            return self._metrics[name]
        raise AttributeError(name)

    def set_info(
        self,
        stored_format: int,
        role: str,
        namespace: str,
        store: str,
        pool: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        """Sets `pdstore_info`, which is equal in an instance's scheduler and workers.

        stored_format: `FORMAT_VERSION`. namespace: as `Namespace.hex`. store: the store's label.
        pool: returns the pool's id, None while it is not known; called by `refresh`, must return at
          once. After a new id, the sample with the old one is 0.
        """
        fixed = (pdstore.__version__, str(stored_format), role, namespace, store)
        self.info.labels(*fixed, "").set(1)
        shown = ""

        def read() -> None:
            nonlocal shown
            if (pool_id := (pool() or b"").hex()) != shown:
                self.info.labels(*fixed, shown).set(0)
                self.info.labels(*fixed, pool_id).set(1)
                shown = pool_id

        self._sources.append(read)

    def add_codes(self, codes: Callable[[], Mapping[str, int]]) -> None:
        """Adds a store's error codes to the metrics. Counts of several stores are summed.

        codes: called by `refresh`; must return at once, and must not raise an exception.
        """
        seen: collections.Counter[str] = collections.Counter()

        def read() -> None:
            for code, count in codes().items():
                self.store_codes.labels(code).inc(max(0, count - seen[code]))
                seen[code] = max(count, seen[code])

        self._sources.append(read)

    def add_breaker(self, is_open: Callable[[], bool]) -> None:
        """Adds a breaker to the metric that shows whether any breaker is open."""
        self._breakers.append(is_open)

    def add_tiers(self, states: Callable[[], Sequence[TierState]]) -> None:
        """Adds the lower tiers of a store. Numbers of one tier by several stores are combined.

        states: called by `refresh`; must return at once, and must not raise an exception.
        """
        self._tiers.append(states)
        seen: collections.Counter[tuple[str, str]] = collections.Counter()

        def read() -> None:
            for tier in states():
                for outcome, count in tier.copies.items():
                    of_one = (tier.name, outcome)
                    self.tier_copies.labels(*of_one).inc(max(0, count - seen[of_one]))
                    seen[of_one] = max(count, seen[of_one])

        self._sources.append(read)

    def refresh(self) -> None:
        """Calls all sources."""
        for read in self._sources:
            read()

    def collect(self) -> Iterable[Family]:
        """Refreshes all metrics; the registry calls it before it shows any. Returns none itself."""
        self.refresh()
        return ()

    def miss(self, reason: Reason, error: Exception | None = None, what: str = "a load") -> None:
        """Counts and logs a miss: a lookup or a load that brought less than was asked.

        what: "a lookup" or "a load", the subject of the log line.
        """
        self.misses.labels(reason.value).inc()
        self._reasons.warn(what, reason, error)

    def drop(self, reason: Reason, error: Exception | None = None) -> None:
        """Counts and logs a drop: a save that was not made or not finished."""
        self.drops.labels(reason.value).inc()
        self._reasons.warn("a save", reason, error)

    def lookup_ended(
        self,
        num_requested: int,
        num_matched: int,
        reason: Reason | None,
        error: Exception | None = None,
    ) -> None:
        """Counts the tokens that a lookup asked for and found; with a reason, counts a miss."""
        if reason is None or reason.cause is not Cause.ENDED:
            self.tokens.labels("requested").inc(num_requested)
        self.tokens.labels("matched").inc(num_matched)
        if reason is not None:
            self.miss(reason, error, "a lookup")

    def job_ended(
        self,
        direction: Direction,
        reason: Reason | None,
        seconds: float,
        error: Exception | None = None,
    ) -> None:
        """Counts a job and its time; with a reason, counts a miss (load) or a drop (save)."""
        self.jobs.labels(direction.value, reason.value if reason else "ok").inc()
        self.job_seconds.labels(direction.value).observe(seconds)
        if reason is not None:
            (self.miss if direction is Direction.LOAD else self.drop)(reason, error)

    def _read_tiers(self) -> None:
        """Sets the gauges of each lower tier from all stores that have it."""
        num_bytes: collections.Counter[str] = collections.Counter()
        is_out: dict[str, bool] = {}
        for tier in itertools.chain.from_iterable(states() for states in self._tiers):
            if not is_first_tier(tier.name):
                num_bytes[tier.name] += tier.num_waiting_bytes
                is_out[tier.name] = is_out.get(tier.name, False) or tier.problem is not None
        for name, is_one_out in is_out.items():
            self.tier_out.labels(name).set(int(is_one_out))
            self.tier_waiting_bytes.labels(name).set(num_bytes[name])

    def _made(self, metric: Metric) -> Shown:
        options: dict[str, Any] = {"buckets": SECONDS} if metric.kind is Kind.HISTOGRAM else {}
        name = f"pdstore_{metric.name}"
        labels = list(metric.labels)
        made = TYPES[metric.kind](name, metric.text, labels, registry=self.registry, **options)
        for values in known_labels(metric):
            made.labels(*values)
        return made


class CallMetrics:
    """The metrics of the calls of a whole store, or of one of its lower tiers.

    tier: the tier's name, as in `TierState`; None for the whole store.
    """

    def __init__(self, metrics: Metrics, tier: str | None = None) -> None:
        self._tier = () if tier is None else (tier,)
        is_whole = tier is None
        self._calls = metrics.store_calls if is_whole else metrics.tier_calls
        self._seconds = metrics.store_seconds if is_whole else metrics.tier_seconds
        self._bytes = metrics.bytes if is_whole else metrics.tier_bytes
        for verb in VERBS:  # what is known is shown before anything is counted
            self._calls.labels(*self._tier, verb, "ok")
            self._seconds.labels(*self._tier, verb)
        for direction in DIRECTIONS:
            self._bytes.labels(*self._tier, direction)

    def call_ended(self, verb: str, outcome: str, seconds: float) -> None:
        """Counts a call and its time. outcome: `ok`, or the class of the error."""
        self._calls.labels(*self._tier, verb, outcome).inc()
        self._seconds.labels(*self._tier, verb).observe(seconds)

    def add_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Counts bytes that a call has moved."""
        self._bytes.labels(*self._tier, direction.value).inc(num_bytes)


def known_labels(metric: Metric) -> Iterable[tuple[str, ...]]:
    """Returns the label values that a metric shows from the start; none if it has no labels."""
    return itertools.product(*metric.labels.values()) if metric.labels else ()
