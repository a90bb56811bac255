"""Reporting: where an instance tells of its state and its requests: a page, the log, spans."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry

import pdstore
from pdstore.format.namespace import Namespace
from pdstore.settings import Settings, origin_of, variable_of
from pdstore.status.server import StatusServer
from pdstore.store.url import StoreURL, without_secret
from pdstore.telemetry.metric_table import METRICS, Across, Kind
from pdstore.telemetry.reasons import ADVICE
from pdstore.telemetry.request_record import Journal
from pdstore.telemetry.spans import Spans

log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, object]

_URLS = ("store", "traces")


class TellsPool(Protocol):
    """The part of a `PrefixCacheManager` that tells where its instance saves and looks."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def pool_id(self) -> bytes | None:
        """None until the store has told it."""

    @property
    def lease_s(self) -> float: ...


class Reporting:
    """Opens what the settings ask for: a page with PDSTORE_STATUS_PORT, spans with PDSTORE_TRACES.

    cache: tells the pool and the namespace.
    registries: hold the instance's metrics, for the page; those of several are added up.
    problem: returns the trouble of the pool now, or None.
    number: this instance's among those that share one environment; the page's port is higher by
      it.
    Raises ConfigError for a port that is taken, MissingExtra.

    journal: takes the records of requests that are over.
    """

    def __init__(
        self,
        settings: Settings,
        cache: TellsPool,
        registries: Sequence[CollectorRegistry],
        problem: Callable[[], str | None],
        number: int = 0,
    ) -> None:
        self.journal = Journal()
        self._server: StatusServer | None = None
        with contextlib.ExitStack() as undo:
            if settings.traces is not None:
                store = StoreURL.of(settings.store).label
                spans = Spans.to(
                    settings.traces, settings.role, namespace=cache.namespace.hex, store=store
                )
                undo.callback(spans.close)
                self.journal.listen(spans.add)
            if settings.status_port is not None:
                tell = partial(snapshot, settings, cache, registries, self.journal, problem)
                port = settings.status_port and settings.status_port + number
                self._server = StatusServer(port, tell)
                undo.callback(self._server.close)
                log.info("status on %s", self._server.url)
            self._opened = undo.pop_all()

    @property
    def url(self) -> str | None:
        """The page's address; None without one."""
        return self._server.url if self._server else None

    def close(self) -> None:
        """Stops the page and sends the last spans. Twice is fine."""
        self._opened.close()


def snapshot(
    settings: Settings,
    cache: TellsPool,
    registries: Sequence[CollectorRegistry],
    journal: Journal,
    problem: Callable[[], str | None],
) -> Json:
    """Returns the object that `/pdstore` shows: the state as it is now. No secret is in it.

    cache: tells the pool and the namespace; its fields show as `Namespace.describe` has them.
    registries: hold its metrics; each number is shown as all of them have it together.
    problem: returns the trouble of the pool now, or None.
    """
    numbers = _numbers_of(registries)
    namespace, pool_id = cache.namespace, cache.pool_id
    return {
        "time": time.time(),
        "version": pdstore.__version__,
        "role": settings.role,
        "store": StoreURL.of(settings.store).label,
        "pool": {"id": pool_id.hex() if pool_id else None, "lease_s": cache.lease_s},
        "namespace": {"hex": namespace.hex, "fields": namespace.describe()},
        "problem": problem(),
        "settings": settings_of(settings),
        "metrics": numbers,
        "reasons": _reasons_of(numbers),
        "requests": [record.as_json() for record in journal.last()],
    }


def settings_of(settings: Settings) -> list[Json]:
    """Returns each setting with its variable, its value without secrets, and its origin."""
    shown: list[Json] = []
    for field in Settings.model_fields:
        value = getattr(settings, field)
        text = str(int(value) if isinstance(value, bool) else value)  # as a variable is written
        if field in _URLS:
            text = without_secret(text)
        origin = origin_of(settings, field)
        shown.append({"name": variable_of(field), "value": text, "origin": origin})
    return shown


def _numbers_of(registries: Sequence[CollectorRegistry]) -> dict[str, float]:
    """Returns counters and gauges by name and labels: `tokens_total|loaded`."""
    found: dict[str, float] = {}
    for family in itertools.chain.from_iterable(each.collect() for each in registries):
        metric = METRICS.get(family.name.removeprefix("pdstore_"))
        if metric is None or metric.kind is Kind.HISTOGRAM or metric.name == "info":
            continue
        for sample in family.samples:
            if sample.name == metric.shown_name:
                labels = [sample.labels[name] for name in metric.labels]
                key = "|".join((sample.name.removeprefix("pdstore_"), *labels))
                before = found.get(key, 0.0)
                is_sum = metric.across is Across.SUM
                found[key] = before + sample.value if is_sum else max(before, sample.value)
    return found


def _reasons_of(numbers: dict[str, float]) -> Json:
    """Returns the reasons that came up, with their counts and what to look at."""
    found: Json = {}
    for reason, advice in ADVICE.items():
        misses = numbers.get(f"misses_total|{reason.value}", 0.0)
        drops = numbers.get(f"drops_total|{reason.value}", 0.0)
        if misses or drops:
            look_at = advice.look_at.replace("`", "")
            found[reason.value] = {"misses": misses, "drops": drops, "look_at": look_at}
    return found
