"""RequestRecord: what happened to a request in an instance. Journal: keeps the last records.

Loss: what a load of the request was to bring and has not brought.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pdstore.errors import Reason

log = logging.getLogger(__name__)

_MAX_CHARS = 80


class Phase(NamedTuple):
    """A part of the time that a request takes.

    name: "wait" for the lookup and P's marker, "load", "compute" until the first token, or "save".
    begin_s, end_s: seconds after the request's arrival.
    """

    name: str
    begin_s: float
    end_s: float


class Loss(NamedTuple):
    """Tokens that a load promised and did not bring, and what is known of the cause.

    num_promised: tokens that the load was to bring, so that the engine relied on them.
    num_lost: those of them that the engine had to compute after all.
    reason: why; `lost` if a value was gone.
    age_s: seconds from the last answer that the store has the blocks to the end of the load's last
      store call; None if P was still saving them.
    lease_s: seconds for which the store keeps what it has answered for; 0 if it promises nothing.
    """

    num_promised: int
    num_lost: int
    reason: Reason
    age_s: float | None
    lease_s: float

    @property
    def words(self) -> str:
        """A sentence for people: how much was lost, and why."""
        words = f"{self.num_lost:,} of {self.num_promised:,} promised tokens were not loaded"
        if self.reason is not Reason.LOST or self.age_s is None:
            return f"{words} ({self.reason.value})"
        words += f" (lost): they were gone {self.age_s:.1f} s after the last lookup, "
        if not self.lease_s:
            return words + "and this store promises no lease"
        is_over = self.age_s > self.lease_s
        return words + ("after" if is_over else "within") + f" its lease of {self.lease_s:g} s"


@dataclass(frozen=True)
class RequestRecord:
    """The record of one request, made when nothing more happens for it in this instance.

    request_id: the client's or the router's id, cut short and without control characters.
    handoff: the hand-off's id in hex; None for a request without a hand-off.
    role: PDSTORE_ROLE.
    arrived_at: seconds since the epoch.
    num_tokens: tokens of the prompt. The counts after it say how many of these tokens this instance
      found in the pool, loaded, computed, and made durable (other requests may save some).
    reason: why less than all was matched, loaded or saved; None if nothing was missing.
    in_store: for each phase with store calls, a phase of the same name, from the begin of its first
      store call to the end of its last.
    traceparent: the W3C trace context that came with the request.
    loss: what a load was to bring and has not brought; None if nothing.
    num_cold: loaded tokens without the KV of this instance's draft model, which then proposes worse
      tokens; 0 without a draft model.
    from_tiers: the loaded tokens by the tier of the store that they were read from: `1 file`, for
      instance; empty if it has no tiers.
    """

    request_id: str
    handoff: str | None
    role: str
    arrived_at: float
    num_tokens: int
    num_matched: int
    num_loaded: int
    num_computed: int
    num_saved: int
    reason: Reason | None
    phases: tuple[Phase, ...] = ()
    in_store: tuple[Phase, ...] = ()
    traceparent: str | None = None
    loss: Loss | None = None
    num_cold: int = 0
    from_tiers: Mapping[str, int] = field(default_factory=dict, hash=False)

    def line(self) -> str:
        """Returns the record as a line for the log."""
        times = ", ".join(f"{p.name} {p.end_s - p.begin_s:.3f} s" for p in self.phases)
        words = (
            f"request {self.request_id}: hand-off {self.handoff or 'none'},"
            f" {self.num_tokens} tokens ({self.num_matched} matched, {self.num_loaded} loaded,"
            f" {self.num_computed} computed, {self.num_saved} saved)"
        )
        if times:
            words += f"; {times}"
        lower = [name for name in self.from_tiers if not name.startswith("0 ")]
        if lower:
            counts = (f"{self.from_tiers[name]} from tier {name}" for name in lower)
            words += f"; of the loaded tokens {', '.join(counts)}"
        if self.num_cold:
            words += f"; {self.num_cold} loaded without the draft model's KV"
        if self.reason is not None:
            words += f"; {self.reason.value}"
        if self.loss is not None:
            words += f"; {self.loss.words}"
        return words

    def as_json(self) -> dict[str, object]:
        """Returns the record as a JSON object."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("phases", "in_store"):
            fields[name] = [phase._asdict() for phase in getattr(self, name)]
        fields["reason"] = self.reason.value if self.reason else None
        if self.loss is not None:
            more = {"reason": self.loss.reason.value, "words": self.loss.words}
            fields["loss"] = self.loss._asdict() | more
        return fields


def plain(text: object, most_chars: int = _MAX_CHARS) -> str:
    """Returns a client's text cut short and without control characters, fit for a log."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most_chars])


@dataclass
class RequestTimer:
    """Measures the times of one request's phases. Any thread may call it.

    clock: monotonic seconds.
    """

    clock: Callable[[], float] = time.monotonic
    arrived_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._zero = self.clock()
        self._begins: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request's arrival."""
        return self.clock() - self._zero

    def begin(self, name: str) -> None:
        """Begins a phase unless it has begun."""
        self._begins.setdefault(name, self.elapsed_s)

    def end(self, name: str) -> None:
        """Ends a phase that has begun; of several calls the last one counts."""
        if name in self._begins:
            self._ends[name] = self.elapsed_s

    def phases(self) -> tuple[Phase, ...]:
        """Returns the phases in the order of their beginnings; a phase that still runs ends now."""
        now = self.elapsed_s
        found = (Phase(n, begin, self._ends.get(n, now)) for n, begin in self._begins.items())
        return tuple(sorted(found, key=lambda phase: phase.begin_s))


class Journal:
    """Keeps the last `most` records, logs them, and tells listeners. Any thread may call it."""

    def __init__(self, most: int = 100) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=most)
        self._listeners: list[Callable[[RequestRecord], None]] = []

    def add(self, record: RequestRecord) -> None:
        """Adds the record of a request that has ended."""
        self._records.append(record)
        log.info("%s", record.line())
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[RequestRecord], None]) -> None:
        """Calls `listener` with each later record. `listener` must not raise an exception."""
        self._listeners.append(listener)

    def last(self) -> list[RequestRecord]:
        """Returns the records that are kept, the oldest first."""
        return list(self._records)
