"""RouterStatus: the state of the router now, as one JSON object for the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from anyio.from_thread import BlockingPortal

import pdstore
from examples.router.bodies import Json
from examples.router.calls import Calls
from examples.router.health import check

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
    """

    def __init__(self, options: object, calls: Calls) -> None:
        self._options, self._calls = options, calls
        self.portal: BlockingPortal | None = None

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
