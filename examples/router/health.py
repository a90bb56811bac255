"""Health: what an instance's /health says about it, and the router's of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import httpx

from examples.router.bodies import Json, message_of, parse
from examples.router.upstreams import Upstream
from examples.router.whole import PROBE_BYTES, PROBE_S, WholeAnswer, ask


@dataclass(frozen=True)
class Health:
    """The state of one instance.

    error: why it cannot answer requests; None if it can.
    problem: why it answers without the pool, if it says so (the mini engine does).
    """

    error: str | None = None
    problem: str | None = None

    @classmethod
    def of(cls, answer: WholeAnswer) -> Health:
        """Returns the state in an instance's answer; vLLM's is empty."""
        if not answer.is_success:
            words = message_of(answer.content)
            return cls(error=f"HTTP {answer.status}{words and ': '}{words}")
        try:
            said = parse(answer.content)
        except ValueError:
            return cls()
        return cls(problem=str(said.get("reason")) if said.get("status") == "degraded" else None)

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
        answer = await ask(client, question, PROBE_S, PROBE_BYTES)
    except httpx.TransportError as error:
        upstream.went_down()
        states[upstream.url] = Health(error=f"cannot be reached: {error!r}")
        return
    upstream.came_back()
    states[upstream.url] = Health.of(answer)
