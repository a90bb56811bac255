"""Counts and Timeline: the router's own metrics, and its last requests with their times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdstore.router.bodies import Json
from pdstore.telemetry.request_record import RequestTimer, plain

FAILURES = ("connect", "timeout", "broken", "status")
"""Why a call of an instance failed: the label `reason`."""

REQUESTS = "router_requests_total"
DEGRADED = "router_degraded_total"
LOST = "router_lost_handoffs_total"
FAILED_CALLS = "router_upstream_failures_total"
_CARDS = {
    "answers": REQUESTS,
    "computed by D for want of P": DEGRADED,
    "began with P's token": "router_spliced_total",
    "lost hand-offs": LOST,
    "failed calls": FAILED_CALLS,
    "clients that left": "router_disconnects_total",
}
_NOT_COUNTED = ("/health", "/metrics")


class Counts:
    """Counters of one router; `text()` is the page of /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter(
            "router_requests",
            "Answers to clients, except those of /health and /metrics.",
            ["status"],
        )
        self.degraded = counter(
            "router_degraded", "Requests that D had to compute because no P could prefill them."
        )
        self.spliced = counter(
            "router_spliced", "Answers that began with P's first token (--first-token prefill)."
        )
        self.lost = counter(
            "router_lost_handoffs",
            "Hand-offs whose request D refused to compute (PDSTORE_ON_MISS=fail).",
        )
        self.failures = counter(
            "router_upstream_failures",
            "Calls of an instance that failed; `status`: it answered 3xx, 408, 429 or 5xx.",
            ["role", "reason"],
        )
        self.disconnects = counter("router_disconnects", "Clients that left before the end.")
        self.first_byte = Histogram(
            "router_first_byte_seconds",
            "From the client's request to the first byte of its answer.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.requests.labels("200")
        for labels in product(("prefill", "decode"), FAILURES):
            self.failures.labels(*labels)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def cards(self) -> dict[str, float]:
        """Returns the totals that the router's page shows."""
        totals = self.totals()
        return {text: totals[name] for text, name in _CARDS.items()}

    def totals(self) -> dict[str, float]:
        """Returns each counter's sum over its labels, by its name on /metrics."""
        return {name: sum(self._values(name).values()) for name in _CARDS.values()}

    def failed_calls(self) -> dict[tuple[str, ...], float]:
        """Returns the calls of instances that failed, by role and reason."""
        values = self._values(FAILED_CALLS)
        return {labels: value for labels, value in values.items() if value}

    def _values(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


class CountedApp:
    """Wraps an application and counts its answers by status, whichever layer gave them."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.requests.labels(str(message["status"])).inc()
            await send(message)

        is_counted = scope["type"] == "http" and scope["path"] not in _NOT_COUNTED
        await self._app(scope, receive, counting_send if is_counted else send)


@dataclass
class Routed:
    """One request on its way, and its phases.

    The phases are "prefill" until P's answer, "decode" until D's first byte, and "answer" until
    the last byte.

    handoff: the id in P's parameters, or in those that were made for P and D.
    reason: why D had to compute it, or did not answer all of it; None if all went well.
    """

    request_id: str
    timer: RequestTimer = field(default_factory=RequestTimer)
    handoff: str | None = None
    reason: str | None = None

    def note_handoff(self, params: Json | None) -> None:
        """Takes the hand-off's id from `kv_transfer_params`, if they have one."""
        ours = (params or {}).get("pdstore")
        if isinstance(ours, Mapping) and isinstance(ours.get("attempt"), str):
            self.handoff = plain(ours["attempt"])

    def as_json(self) -> Json:
        """Returns the request as a JSON object for the page."""
        phases = [phase._asdict() for phase in self.timer.phases()]
        return {
            "request_id": plain(self.request_id),
            "handoff": self.handoff,
            "arrived_at": self.timer.arrived_at,
            "phases": phases,
            "reason": self.reason,
        }


class Timeline:
    """Keeps the last `most` requests. Any thread may read them."""

    def __init__(self, most: int = 100) -> None:
        self._last: deque[Json] = deque(maxlen=most)

    def add(self, routed: Routed) -> None:
        """Takes a request that is over."""
        self._last.append(routed.as_json())

    def last(self) -> list[Json]:
        """Returns the requests, the oldest first."""
        return list(self._last)
