"""Records: makes one record for each request, after the request and all of its jobs have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pdstore.engine.job_end import JobEnd, TimeRange, loaded_by_tier
from pdstore.engine.request import EngineRequest
from pdstore.errors import Direction
from pdstore.scheduler.break_even import CostAverage
from pdstore.telemetry.request_record import Journal, Phase, RequestRecord, plain


class Records:
    """Gives the journal one record for each request. Any thread may call it.

    It also sets the metric of the time that a prompt's token takes to compute.

    role: PDSTORE_ROLE.
    job_timeout_s: how long a record waits for jobs that still run after the request's end.
    """

    def __init__(
        self,
        journal: Journal,
        role: str,
        job_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._role = role
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ended: dict[EngineRequest, float] = {}  # when its record is due
        self._prefill_times = _PrefillTimes()

    def ended_request(self, request_id: str) -> EngineRequest | None:
        """Returns the ended request with this id whose record still waits for jobs; else None."""
        with self._lock:
            return next((each for each in self._ended if each.id == request_id), None)

    def has_running_jobs(self) -> bool:
        """Returns whether the record of any request that has ended still waits for its jobs."""
        now = self._clock()
        with self._lock:
            late = [request for request, at in self._ended.items() if now > at]
        for request in late:
            self._make(request)
        return bool(self._ended)

    def job_ended(self, request: EngineRequest, end: JobEnd) -> None:
        """Adds the end of a job; its request may have ended before."""
        if end.direction is Direction.SAVE:
            request.cache.note_saves([end.reason])
        else:
            request.cache.note_job(end.reason)
        with self._lock:
            request.ends.append(end)
            is_over = request in self._ended and len(request.ends) >= request.num_jobs
        if is_over:
            self._make(request)

    def end_request(self, request: EngineRequest) -> None:
        """Makes the record of a request that has ended, now or when its jobs have ended."""
        with self._lock:
            self._ended[request] = self._clock() + self._job_timeout_s
            is_over = len(request.ends) >= request.num_jobs
        if is_over:
            self._make(request)

    def close(self) -> None:
        """Makes the records of all ended requests, even if their jobs still run."""
        for request in list(self._ended):
            self._make(request)

    def _make(self, request: EngineRequest) -> None:
        with self._lock:
            is_first = self._ended.pop(request, None) is not None
        if is_first:
            record = record_of(request, self._role)
            self._journal.add(record)
            cost_s = self._prefill_times.cost_with(record)
            request.cache.metrics.compute_seconds_per_token.set(cost_s or 0.0)


class _PrefillTimes:
    """Measures what a prompt's token takes to compute, whatever PDSTORE_LOAD is.

    Prompts are computed at the same time, so only the time since the last first token counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cost = CostAverage()
        self._last_end_s = 0.0

    def cost_with(self, record: RequestRecord) -> float | None:
        """Adds a request's record; returns the seconds of a token, None before any is known."""
        with self._lock:
            for phase in record.phases:
                if phase.name == "compute":
                    begin_s = max(record.arrived_at + phase.begin_s, self._last_end_s)
                    end_s = record.arrived_at + phase.end_s
                    self._cost.add_sample(record.num_computed, end_s - begin_s)
                    self._last_end_s = max(end_s, self._last_end_s)
            return self._cost.per_token_s


def record_of(request: EngineRequest, role: str) -> RequestRecord:
    """Returns the record of a request. If ranks differ, the rank that did least counts."""
    handoff = request.handoff or (request.given.id if request.given is not None else None)
    loads, saves = (
        [end for end in list(request.ends) if end.direction is direction] for direction in Direction
    )
    reasons = [end.reason for end in (*saves, *loads)]
    num_prompt = request.keys.num_tokens
    num_loaded = min((end.num_tokens for end in loads), default=request.num_present)
    phases = [
        *request.timer.phases(),
        *_phase(request, "load", [end.ran for end in loads]),
        *_phase(request, "save", [end.ran for end in saves]),
    ]
    return RequestRecord(
        request_id=plain(request.id),
        handoff=handoff.hex if handoff is not None else None,
        role=role,
        arrived_at=request.timer.arrived_at,
        num_tokens=num_prompt,
        num_matched=request.found.num_tokens if request.found is not None else 0,
        num_loaded=max(0, min(num_loaded, num_prompt - 1) - request.num_present),
        num_computed=request.num_prefill_tokens,
        num_saved=_saved_by_all(saves, is_published=request.is_published),
        num_cold=request.drafts.num_cold,
        from_tiers=request.cache.named_tiers(loaded_by_tier(loads)),
        reason=next((reason for reason in (*reasons, request.reason) if reason is not None), None),
        loss=request.loss,
        phases=tuple(sorted(phases, key=lambda phase: phase.begin_s)),
        in_store=(
            *_phase(request, "load", [end.in_store for end in loads]),
            *_phase(request, "save", [end.in_store for end in saves]),
        ),
        traceparent=request.traceparent,
    )


def _phase(
    request: EngineRequest, name: str, intervals: Sequence[TimeRange | None]
) -> tuple[Phase, ...]:
    """Returns one phase that spans all known intervals; an empty tuple if none is known."""
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return ()
    arrived_at = request.timer.arrived_at
    begin = min(i.begin_at for i in known)
    end = max(i.end_at for i in known)
    return (Phase(name, max(0.0, begin - arrived_at), max(0.0, end - arrived_at)),)


def _saved_by_all(saves: Sequence[JobEnd], *, is_published: bool) -> int:
    """Returns how many leading tokens are durable on all ranks; each save has a job on every rank.

    Most saves report only on their own blocks, so a save that fell short ends the count. But the
    last save of a hand-off reports on all blocks of the prompt, so it counts in any case.
    """
    ends_of: dict[int, list[JobEnd]] = {}
    for end in saves:
        ends_of.setdefault(end.number or 0, []).append(end)
    num_tokens = 0
    is_whole = True
    for number in sorted(ends_of):
        ends = ends_of[number]
        if is_whole or (is_published and number == max(ends_of)):
            num_tokens = max(num_tokens, min(end.num_tokens for end in ends))
            is_whole = all(end.reason is None for end in ends)
    return num_tokens
