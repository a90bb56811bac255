"""Health: what an instance's /health says about it, the router's of them all, and its page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import anyio
import httpx
from anyio.from_thread import BlockingPortal

import pdstore
from pdstore.router.answers import PROBE_BYTES, PROBE_TIMEOUT_S, WholeAnswer, ask
from pdstore.router.bodies import Json, message_of, parse
from pdstore.router.calls import Calls
from pdstore.router.counts import DEGRADED, FAILED_CALLS, LOST, REQUESTS
from pdstore.router.upstreams import Upstream
from pdstore.status.history import Curve, History

CURVES = (
    Curve("answers/s", (REQUESTS,)),
    Curve("computed by D for want of P", (DEGRADED,), of=(REQUESTS,)),
    Curve("lost hand-offs", (LOST,), of=(REQUESTS,)),
    Curve("failed calls/s", (FAILED_CALLS,)),
)
"""What the router's page shows of the last hour."""


@dataclass(frozen=True)
class Health:
    """The state of one instance.

    error: why it cannot answer requests; None if it can.
    problem: why it answers without the pool, if it says so (the mini engine does).
    """

    error: str | None = None
    problem: str | None = None

    @classmethod
    def told_by(cls, answer: WholeAnswer) -> Health:
        """Returns the state in an instance's answer; vLLM's is empty."""
        if not answer.is_success:
            words = message_of(answer.content)
            return cls(error=f"HTTP {answer.status}{words and ': '}{words}")
        try:
            body = parse(answer.content)
        except ValueError:
            return cls()
        return cls(problem=str(body.get("reason")) if body.get("status") == "degraded" else None)

    def as_json(self) -> dict[str, object]:
        """Returns the state as the router's own /health shows it."""
        return {"ok": self.error is None, "error": self.error, "problem": self.problem}


class Checkup(NamedTuple):
    """The answer of /health, which the page shows too.

    status: `down` if no D can answer, `degraded` if not all is as it should be, else `ok`.
    reasons: why it is not `ok`.
    upstreams: each instance with its state.
    """

    status: str
    reasons: list[str]
    upstreams: list[Json]


async def check(client: httpx.AsyncClient, upstreams: Sequence[Upstream]) -> Checkup:
    """Asks all instances for their health, at once."""
    states: dict[str, Health] = {}
    async with anyio.create_task_group() as group:
        for upstream in upstreams:
            group.start_soon(_probe, client, upstream, states)
    alive = {upstream.role for upstream in upstreams if states[upstream.url].error is None}
    reasons = [
        f"{u.role} {u.url}: {state.error or state.problem}"
        for u in upstreams
        if (state := states[u.url]).error or state.problem
    ]
    status = "down" if "decode" not in alive else "degraded" if reasons else "ok"
    shown = [{"url": u.url, "role": u.role, **states[u.url].as_json()} for u in upstreams]
    return Checkup(status, reasons, shown)


async def _probe(client: httpx.AsyncClient, upstream: Upstream, states: dict[str, Health]) -> None:
    try:
        question = client.build_request("GET", upstream.url + "/health")
        answer = await ask(client, question, PROBE_TIMEOUT_S, PROBE_BYTES)
    except httpx.TransportError as error:
        upstream.went_down()
        hint = upstream.way_to(str(error))
        states[upstream.url] = Health(error=f"cannot be reached: {error!r}{hint}")
        return
    upstream.came_back()
    states[upstream.url] = Health.told_by(answer)


_LOOK_AT = {
    "connect": "whether it runs, and listens there",
    "timeout": "its load, and its log",
    "broken": "its log: it ended in the middle of an answer",
    "status": "its log: it answered with an error of its own",
}


class RouterStatus:
    """Makes the object that `/pdstore` shows. Any thread may call it.

    options: a dataclass, shown field by field, with those of dataclasses in it.
    portal: the way into the router's event loop; None before that runs.
    history: of the counters; the page's thread adds to it.
    """

    def __init__(self, options: object, calls: Calls) -> None:
        self._options = options
        self._calls = calls
        self.portal: BlockingPortal | None = None
        self.history = History(CURVES, calls.counts.totals)

    def take(self) -> Json:
        """Returns the state as it is now."""
        calls = self._calls
        return {
            "time": time.time(),
            "version": pdstore.__version__,
            "role": "router",
            "store": f"{len(calls.prefills.upstreams)} P, {len(calls.decodes.upstreams)} D",
            **self._health(),
            "settings": list(_settings_of(self._options)),
            "cards": calls.counts.cards(),
            "curves": self.history.as_json(calls.counts.totals()),
            "reasons": {
                f"{role}: {reason}": {"misses": count, "drops": 0, "look_at": _LOOK_AT[reason]}
                for (role, reason), count in calls.counts.failed_calls().items()
            },
            "requests": calls.timeline.last(),
        }

    def _health(self) -> Json:
        """Returns what /health says: `degraded` or `down`, and why; no problem if it says `ok`."""
        if self.portal is None:
            return {"status": "down", "problem": "the router is starting"}
        now = self.portal.call(check, self._calls.client, self._calls.upstreams)
        return {"status": now.status, "problem": "; ".join(now.reasons) or None}


def _settings_of(options: object) -> Iterator[Json]:
    """Yields each field of a dataclass, and those of dataclasses in it."""
    for each in fields(options):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if is_dataclass(value):
            yield from _settings_of(value)
            continue
        origin = "default" if value == each.default else "argument"
        text = " ".join(value) if isinstance(value, tuple) else str(value)
        yield {"name": each.name, "value": text, "origin": origin}
