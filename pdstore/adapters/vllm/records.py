"""Records: makes the record of a request when it has finished and its jobs have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pdstore.adapters.vllm.messages import EndedJob, Interval
from pdstore.adapters.vllm.request import RequestTracker
from pdstore.outcome import Direction
from pdstore.telemetry.journal import Journal
from pdstore.telemetry.request_record import Phase, RequestRecord, plain

_PATIENCE_S = 60.0


class Records:
    """Hears of jobs and of the ends of requests; the journal gets each request once.

    Only the scheduler's thread calls it.

    role: PDSTORE_ROLE.
    patience_s: after this time a request's record is made without the jobs that still run.
    """

    def __init__(
        self,
        journal: Journal,
        role: str,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._role = journal, role
        self._patience_s, self._clock = patience_s, clock
        self._waiting: dict[str, tuple[RequestTracker, float]] = {}  # finished, with their deadline

    @property
    def is_waiting(self) -> bool:
        """True while a finished request has jobs that run: their ends come with vLLM's steps."""
        now = self._clock()
        for request_id, (tracker, deadline) in list(self._waiting.items()):
            if now > deadline:
                self._close(request_id, tracker)
        return bool(self._waiting)

    def take(self, ended: Sequence[EndedJob], running: Mapping[str, RequestTracker]) -> None:
        """Takes the jobs that have ended on some rank.

        running: the requests that have not finished.
        """
        for job in ended:
            tracker = running.get(job.request_id)
            if tracker is not None:
                tracker.ended.append(job)
            elif job.request_id in self._waiting:
                tracker, _ = self._waiting[job.request_id]
                tracker.ended.append(job)
                self._close_if_over(tracker)

    def finish(self, tracker: RequestTracker) -> None:
        """Takes a request that has finished."""
        tracker.timer.end("compute")
        deadline = self._clock() + self._patience_s
        self._waiting[tracker.request.request_id] = (tracker, deadline)
        self._close_if_over(tracker)

    def close(self) -> None:
        """Makes the records that are left."""
        for request_id, (tracker, _) in list(self._waiting.items()):
            self._close(request_id, tracker)

    def _close_if_over(self, tracker: RequestTracker) -> None:
        if len(tracker.ended) >= tracker.num_jobs:
            self._close(tracker.request.request_id, tracker)

    def _close(self, request_id: str, tracker: RequestTracker) -> None:
        del self._waiting[request_id]
        self._journal.add(record_of(tracker, self._role))


def record_of(tracker: RequestTracker, role: str) -> RequestRecord:
    """Returns the record of a request: of several ranks the one that did least counts."""
    request, found = tracker.request, tracker.found
    handoff = tracker.handoff or (tracker.given.id if tracker.given is not None else None)
    loads, saves = (
        [job for job in tracker.ended if job.direction is direction] for direction in Direction
    )
    reasons = [job.reason for job in (*saves, *loads)]
    reasons.append(found.reason if found is not None else None)
    num_prompt = int(request.num_prompt_tokens)
    num_loaded = min((job.num_tokens for job in loads), default=tracker.num_computed)
    return RequestRecord(
        request_id=plain(request.request_id),
        handoff=handoff.hex if handoff is not None else None,
        role=role,
        arrived_at=tracker.timer.arrived_at,
        num_tokens=num_prompt,
        num_matched=found.num_tokens if found is not None else 0,
        num_loaded=max(0, min(num_loaded, num_prompt - 1) - tracker.num_computed),
        num_computed=tracker.num_fed,
        num_saved=_saved_by_all(saves, is_handed_over=tracker.is_announced),
        reason=next((reason for reason in reasons if reason is not None), None),
        phases=_phases(tracker, loads, saves),
        in_store=(
            *_phase(tracker, "load", [job.in_store for job in loads]),
            *_phase(tracker, "save", [job.in_store for job in saves]),
        ),
        traceparent=(getattr(request, "trace_headers", None) or {}).get("traceparent"),
    )


def _phases(
    tracker: RequestTracker, loads: Sequence[EndedJob], saves: Sequence[EndedJob]
) -> tuple[Phase, ...]:
    phases = [
        *tracker.timer.phases(),
        *_phase(tracker, "load", [job.ran for job in loads]),
        *_phase(tracker, "save", [job.ran for job in saves]),
    ]
    return tuple(sorted(phases, key=lambda phase: phase.begin_s))


def _phase(
    tracker: RequestTracker, name: str, intervals: Sequence[Interval | None]
) -> tuple[Phase, ...]:
    """Returns the phase from the first begin to the last end, if there is one."""
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return ()
    arrived_at = tracker.timer.arrived_at
    begin, end = min(i.begin_at for i in known), max(i.end_at for i in known)
    return (Phase(name, max(0.0, begin - arrived_at), max(0.0, end - arrived_at)),)


def _saved_by_all(saves: Sequence[EndedJob], *, is_handed_over: bool) -> int:
    """Returns the leading tokens that are durable in the pool: all ranks make each save.

    A save knows of its own blocks alone, so one that fell short ends the count. The last one of a
    hand-off knows of all.
    """
    jobs_of: dict[int, list[EndedJob]] = {}
    for job in saves:
        jobs_of.setdefault(job.number or 0, []).append(job)
    num_tokens, is_whole = 0, True
    for number in sorted(jobs_of):
        jobs = jobs_of[number]
        if is_whole or (is_handed_over and number == max(jobs_of)):
            num_tokens = max(num_tokens, min(job.num_tokens for job in jobs))
            is_whole = all(job.reason is None for job in jobs)
    return num_tokens
