"""Reporting: where an instance tells of its requests: the log, a page, spans."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from pdstore.settings import Settings
from pdstore.status.server import StatusServer
from pdstore.status.snapshot import Snapshot, TellsPool
from pdstore.store.url import StoreURL
from pdstore.telemetry.journal import Journal
from pdstore.telemetry.spans import Spans

log = logging.getLogger(__name__)


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
                shown = Snapshot(settings, cache, registries, self.journal, problem)
                port = settings.status_port and settings.status_port + number
                self._server = StatusServer(port, shown.take)
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
