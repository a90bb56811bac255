"""JobEnd: how a load or a save of a request ended on one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdstore.errors import Direction, Reason
from pdstore.format.plan import LoadPlan
from pdstore.telemetry.request_record import Loss
from pdstore.worker.job import Job


class TimeRange(NamedTuple):
    """A span of time. Its begin and its end are seconds since the epoch."""

    begin_at: float
    end_at: float


@dataclass(frozen=True)
class JobEnd:
    """The end of one load or save on one rank; it may be sent to another process.

    request_id: the engine's id of the request. number: its number of the save; None for a load.
    num_tokens, reason: as in `JobResult`.
    ran: from the job's start to its end; None for a job that could not begin.
    in_store: from the begin of its first store call to the end of its last; None if it made none.
    num_with_drafts: of a load, as `Job.num_with_drafts`; None stands for all of `num_tokens`.
    by_tier: of a load, as `Job.by_tier`.
    """

    request_id: str
    number: int | None
    direction: Direction
    num_tokens: int
    reason: Reason | None
    ran: TimeRange | None = None
    in_store: TimeRange | None = None
    num_with_drafts: int | None = None
    by_tier: Mapping[int, int] = field(default_factory=dict, hash=False)

    @classmethod
    def fault(
        cls,
        direction: Direction,
        request_id: str = "",
        number: int | None = None,
        reason: Reason = Reason.FAULT,
    ) -> JobEnd:
        """Returns the end of a job that could not begin."""
        return cls(request_id, number, direction, 0, reason)

    @classmethod
    def of_job(cls, job: Job, request_id: str = "", number: int | None = None) -> JobEnd:
        """Returns the end of a job that has just ended."""
        result, calls, now = job.result, job.in_store, time.monotonic()
        assert result is not None
        zero = time.time() - now  # the monotonic clock's zero, in seconds since the epoch
        return cls(
            request_id,
            number,
            job.direction,
            result.num_tokens,
            result.reason,
            TimeRange(zero + job.began, zero + now),
            TimeRange(zero + calls[0], zero + calls[1]) if calls is not None else None,
            job.num_with_drafts,
            job.by_tier,
        )


def loaded_by_all(plan: LoadPlan, ends: Sequence[JobEnd]) -> int:
    """Returns how many leading tokens are there on all ranks after a load has ended."""
    num_loaded = min((end.num_tokens for end in ends), default=plan.first_token)
    return max(plan.first_token, num_loaded)


def loaded_by_tier(ends: Sequence[JobEnd]) -> Mapping[int, int]:
    """Returns how many tokens a load has read from each tier, on the rank that has read least.

    Empty if the store has no tiers, or if the load has read nothing.
    """
    return min(ends, key=lambda end: end.num_tokens).by_tier if ends else {}


class LoadOutcome(NamedTuple):
    """The outcome of a load after its jobs have ended on all ranks.

    num_tokens: leading tokens of the prompt that are there on all ranks.
    seconds: of the job that took longest; 0 if none has run.
    by_tier: the tokens that were read from each tier of the store; empty if it has no tiers.
    reason: why less than all was loaded, if so.
    """

    num_tokens: int
    seconds: float
    by_tier: Mapping[int, int]
    reason: Reason

    @classmethod
    def of(cls, plan: LoadPlan, ends: Sequence[JobEnd]) -> LoadOutcome:
        """Returns the outcome of a planned load from the ends of its jobs."""
        times = (end.ran.end_at - end.ran.begin_at for end in ends if end.ran is not None)
        reasons = (end.reason for end in ends if end.reason is not None)
        return cls(
            loaded_by_all(plan, ends),
            max(times, default=0.0),
            loaded_by_tier(ends),
            next(reasons, Reason.FAULT),
        )


@dataclass
class DraftRows:
    """Tells from which token on all rows in a draft's cache are a request's own.

    An engine with a draft model computes the draft's rows with the model's, except in steps that
    do not run the draft model. A load, too, may have brought the model's KV without the draft's,
    and an engine's own prefix cache does not tell what earlier requests have left in the draft's.

    first_own: rows from this token on were loaded for the request, or computed in it. What the
      engine has of earlier requests lies before it. None before anything is known.
    num_cold: the tokens that the last load has brought without the drafts' KV.
    """

    first_own: int | None = None
    num_cold: int = 0

    def loaded(self, plan: LoadPlan, num_loaded: int, ends: Sequence[JobEnd]) -> int:
        """Notes what a load has brought, and returns `num_cold`. With a gap, no row of it counts.

        num_loaded: as `loaded_by_all` returns it.
        """
        counts = (end.num_with_drafts for end in ends if end.num_with_drafts is not None)
        num_warm = max(plan.first_token, min(counts, default=num_loaded))
        self.num_cold = max(0, num_loaded - num_warm)
        self.first_own = num_loaded if self.num_cold else plan.first_token
        return self.num_cold

    def begin_step(self, start: int, stop: int, *, runs_draft: bool) -> None:
        """Notes that the engine computes tokens from `start` on, up to index `stop` - 1.

        runs_draft: False if it does not compute the draft's rows of them.
        """
        if not runs_draft:
            self.first_own = max(self.first_own or 0, stop)
        else:
            self.first_own = start if self.first_own is None else min(self.first_own, start)


def loss_of(
    plan: LoadPlan,
    num_loaded: int,
    ends: Sequence[JobEnd],
    reason: Reason,
    *,
    found_at: float,
    lease_s: float,
) -> Loss:
    """Returns what a load has not brought of what it was to bring.

    num_loaded: leading tokens of the prompt that are there.
    found_at, lease_s: when the store last told that it has the blocks, and for how long.
    """
    num_promised = plan.num_tokens - plan.first_token
    num_lost = plan.num_tokens - num_loaded
    age_s = None if plan.follow else _last_call_at(ends) - found_at
    return Loss(num_promised, num_lost, reason, age_s, lease_s)


def _last_call_at(ends: Sequence[JobEnd]) -> float:
    """Returns when the last store call of some jobs ended, in seconds of the monotonic clock.

    Of a job that made none, its own end counts. If no job has run, it is now.
    """
    now = time.monotonic()
    zero = time.time() - now
    ranges = [end.in_store or end.ran for end in ends]
    return max((each.end_at - zero for each in ranges if each is not None), default=now)
