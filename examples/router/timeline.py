"""Timeline: the last requests of the router, each with the time that P and D took of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from examples.router.bodies import Json
from pdstore.telemetry.request_record import RequestTimer, plain


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
