"""Tracker: the lookup and the jobs of one request, and the record of what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pdstore
from examples.mini_engine.request import Request
from pdstore.telemetry.request_record import Phase, plain


@dataclass
class Tracker:
    """The lookup and the jobs of one request.

    handoff: set if this instance is P for the request.
    is_started: a chunk of the prompt was begun.
    num_saved: leading tokens that are in the pool or on their way.
    decoded: keys of the prompt and the answer, in whole blocks.
    """

    keys: pdstore.PromptKeys
    lookup: pdstore.Lookup
    timer: pdstore.RequestTimer
    handoff: pdstore.HandoffId | None = None
    found: pdstore.Match | None = None
    load: pdstore.Job | None = None
    is_started: bool = False
    saves: list[pdstore.Job] = field(default_factory=list)
    publish: pdstore.Job | None = None
    num_saved: int = 0
    decoded: pdstore.PromptKeys | None = None

    def poll(self) -> pdstore.Match | None:
        """Returns the lookup's match, and notes when it came."""
        if self.found is None:
            self.found = self.lookup.poll()
            if self.found is not None:
                self.timer.end("wait")
        return self.found

    def add_save(self, job: pdstore.Job) -> None:
        """Takes a save that has begun, and times it."""
        self.saves.append(job)
        self.timer.begin("save")
        job.on_end(lambda _: self.timer.end("save"))

    def when_saved(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once all saves have ended, on any thread."""
        running = next((job for job in self.saves if not job.done), None)
        if running is None:
            tell()
        else:
            running.on_end(lambda _: self.when_saved(tell))

    def record(self, request: Request, role: str) -> pdstore.RequestRecord:
        """Returns the record of a request whose jobs have ended."""
        asked = self.handoff or (self.lookup.handoff.id if self.lookup.handoff else None)
        results = [job.result for job in self.saves if job.result is not None]
        cut = next((result.reason for result in results if result.reason), None)
        missed = pdstore.Reason(request.miss_reason) if request.miss_reason else None
        return pdstore.RequestRecord(
            request_id=plain(request.id),
            handoff=asked.hex if asked else None,
            role=role,
            arrived_at=self.timer.arrived_at,
            num_tokens=len(request.prompt),
            num_matched=self.found.num_tokens if self.found else 0,
            num_loaded=request.num_loaded,
            num_computed=request.num_fed,
            num_saved=self._num_durable(),
            reason=cut or missed,
            phases=self.timer.phases(),
            in_store=self._in_store("load", [self.load]) + self._in_store("save", self.saves),
            traceparent=request.traceparent,
        )

    def _num_durable(self) -> int:
        """Returns the leading tokens that are in the pool.

        A save knows of its own blocks alone, the publishing one of all.
        """
        num_tokens = 0
        is_whole = True
        for job in self.saves:
            result = job.result
            if result is not None and (is_whole or job is self.publish):
                num_tokens = max(num_tokens, result.num_tokens)
                is_whole = result.reason is None
        return num_tokens

    def _in_store(self, name: str, jobs: Sequence[pdstore.Job | None]) -> tuple[Phase, ...]:
        calls = [job.in_store for job in jobs if job is not None and job.in_store is not None]
        return self.timer.between(name, calls)
