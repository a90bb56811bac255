"""EngineRequest: the state of one request, from its lookup to its last save, for any engine.

An adapter asks an EngineRequest what to load and what to save, and reports the outcome to it. An
EngineRequest moves no bytes: the adapter passes its plans to `KVPool`, maybe in another process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pdstore.engine.job_end import DraftRows, JobEnd, LoadOutcome, loss_of
from pdstore.engine.phase import PROMPT_GIVEN, RequestPhase, check_call
from pdstore.errors import Direction, Reason
from pdstore.format.handoff import Handoff, HandoffId, TransferParams
from pdstore.format.keys import Json, PromptKeys
from pdstore.format.plan import Announcement, LoadPlan, PromptSave, SavePlan
from pdstore.scheduler.break_even import Decision, PromptTimes
from pdstore.scheduler.lookup import Lookup, Match
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.telemetry.request_record import Loss, RequestTimer


@dataclass(eq=False)
class EngineRequest:
    """One request's use of the pool. Only the scheduler's thread calls it.

    Its `phase` says which calls are legal (`pdstore.engine.phase.LEGAL`); any other call raises
    IllegalCall and changes nothing.

    Each plan becomes one job on each rank, and `Records.job_ended` gets the end of every job.

    id, traceparent: the request's id and trace context, for its record.
    params: the request's `kv_transfer_params`, parsed or not. A malformed hand-off in them raises
      ValueError.
    prompt_times: decides what is loaded; None loads all that is found.
    may_load: False if the engine computes all of the prompt, whatever the pool has.
    may_follow: True to load a hand-off while P still saves it. False makes D wait until P is done;
      use False if the engine fails a request whose load falls short.
    num_ranks: how many workers take part in each load and each save.

    handoff: the hand-off's id if this instance is P for the request, else None.
    given: the hand-off that came with the request, if this instance is D.
    found: the lookup's match, once `poll` has seen it. While the request waits, the pool's answer
      is renewed; `find` takes the newest, and `num_saved`, `reason` and `failure` go by it.
    num_present: leading tokens that the engine had when it last asked what can be loaded.
    num_saved: leading tokens that are in the pool or being saved.
    num_prefill_tokens: tokens of the prompt that this instance's model was given to compute.
    num_jobs, ends: the number of planned jobs on all ranks, and the ends of those that have ended.
    loss: what a load was to bring and has not brought; None if no load fell short.
    """

    cache: PrefixCacheManager
    settings: Settings
    keys: PromptKeys
    params: Mapping[str, Json] | TransferParams | None = None
    id: str = ""
    traceparent: str | None = None
    prompt_times: PromptTimes | None = None
    may_load: bool = True
    may_follow: bool = True
    num_ranks: int = 1

    handoff: HandoffId | None = field(init=False, default=None)
    given: Handoff | None = field(init=False, default=None)
    found: Match | None = field(init=False, default=None)
    num_present: int = field(init=False, default=0)
    num_saved: int = field(init=False, default=0)
    num_prefill_tokens: int = field(init=False, default=0)
    decision: Decision | None = field(init=False, default=None)
    is_published: bool = field(init=False, default=False)
    num_jobs: int = field(init=False, default=0)
    ends: list[JobEnd] = field(init=False, default_factory=list)
    loss: Loss | None = field(init=False, default=None)
    timer: RequestTimer = field(init=False, default_factory=RequestTimer)
    drafts: DraftRows = field(init=False, default_factory=DraftRows)

    def __post_init__(self) -> None:
        asked = TransferParams.parse(self.params)
        is_prefill = self.cache.is_prefill(asked)
        self._announce: Announcement | None = None
        self._first_save: PromptSave | None = None
        self._answer: dict[str, Json] = {}
        self._lookup: Lookup | None = None
        self._is_looking = self.may_load
        self._num_usable = 0  # leading tokens of the match that the engine may count as computed
        self._asked_at = time.monotonic()  # when the prompt is looked up first
        self._load: LoadPlan | None = None  # the load that runs
        self._num_earlier_ends = 0
        self._shortfall: Reason | None = None
        self._phase = RequestPhase.LOOKUP if self.may_load else RequestPhase.FOUND  # but for loads
        self._has_left = False
        self._has_states = self.keys.namespace.continuation.is_exact
        self._is_past = False  # the last step computed the prompt's last token, or an answer's
        if is_prefill:
            self.handoff, self._answer = self.cache.announce(self.keys, asked)
            if asked.handoff is not None:  # the router has asked P and D at once
                self._announce = Announcement(self.handoff, self.keys.num_tokens)
        else:
            self.given = asked.handoff
        self._may_wait = self.given is None or self.given.num_tokens is not None  # P has answered
        if self.may_load:
            find = self.cache.follow if self.may_follow else self.cache.lookup
            self.timer.begin("wait")
            self._lookup = find(self.keys, TransferParams() if is_prefill else asked, is_held=True)

    @property
    def phase(self) -> RequestPhase:
        """Where the request stands."""
        if self._load is None:
            return self._phase
        return RequestPhase.LOADING if self.is_loading else RequestPhase.LOADED

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Returns whether the lookup has ended. The first call waits for it, up to `timeout_s`.

        If the request has begun, it was preempted and waits anew: then the pool is asked anew.
        """
        self._check("poll")
        if self._lookup is None or not self.may_load:
            return True
        if not self._is_looking and self._lookup.may_be_repeated:
            self._lookup = self.cache.look_again(self._lookup)
            self._is_looking = self._may_wait = True
        if not self._is_looking:
            return True
        try:
            self._take(self._lookup.wait(timeout_s if self._may_wait else 0.0))
        except TimeoutError:
            return False
        finally:
            self._may_wait = False
        self._is_looking = False
        if self._phase is RequestPhase.LOOKUP:
            self._phase = RequestPhase.FOUND
            self.timer.end("wait")
        return True

    def find(self, num_present: int, num_tokens: int) -> int:
        """Returns how many leading tokens the engine can have after a load.

        num_present: leading tokens that the engine has now; also the result if no load is worth it,
          or if the request must fail (`failure`).
        num_tokens: tokens of the prompt; for a preempted request, of the prompt and the answer.
        """
        self._check("find")
        self.num_present = self.drafts.first_own = num_present  # of earlier requests
        if self._lookup is not None and not (self._is_looking or self._lookup.is_over):
            self._take(self._lookup.found)
        if self.found is None or not self.may_load or self.failure is not None:
            return num_present
        if num_present >= num_tokens - 1:
            return num_present  # the last token is computed anyway
        most = self.keys.namespace.continuation.most_present(num_tokens)
        end = self._num_usable = max(num_present, min(self.found.num_tokens, most))
        is_followed = self.found.follow is not None and self.settings.load == "auto"
        if self.prompt_times is None or is_followed:  # D is no faster than P
            return end
        self.decision = self.prompt_times.decide(
            self, start=num_present, found=end, num_tokens=num_tokens, spans=self.found.spans
        )
        if self._phase in PROMPT_GIVEN:  # preempted: nobody reports the end of its second prefill
            self.prompt_times.forget(self)
        return self.decision.num_tokens

    def plan_load(self, end: int, room: int) -> LoadPlan:
        """Returns the plan of a load of the tokens after `num_present`.

        end: leading tokens that the engine relies on: what `find` returned, or fewer.
        room: tokens that fit into the engine blocks of the request.
        """
        self._check("plan_load")
        assert self.found is not None, "find has offered nothing"
        self._serve()
        keys = self.found.keys
        if end < self._num_usable or keys.num_tokens > room:
            keys = keys.prefix(end)
        follow, waited_s = self.found.follow, time.monotonic() - self._asked_at
        self._load = LoadPlan(keys, self.num_present, end, follow, waited_s)
        self._num_earlier_ends = len(self.ends)
        self.num_jobs += self.num_ranks
        self.cache.metrics.tokens.labels("promised").inc(end - self.num_present)
        return self._load

    @property
    def is_loading(self) -> bool:
        """True while a rank's job of the planned load has not ended."""
        return self._load is not None and len(self._load_ends()) < self.num_ranks

    def end_load(self) -> int:
        """Ends the load after all ranks' jobs have ended; returns how many tokens are present.

        After a load that fell short, the request does not load again. If no load was planned, or it
        was given up, nothing ends.
        """
        self._check("end_load")
        plan = self._load
        self._load = None
        if plan is None:
            return self.num_present
        ends = self._load_ends()
        num_loaded, seconds, by_tier, reason = LoadOutcome.of(plan, ends)
        num_kept = min(num_loaded, plan.num_tokens) - plan.first_token
        self.cache.note_load(num_kept, self.drafts.loaded(plan, num_loaded, ends), by_tier)
        if self.prompt_times is not None:
            self.prompt_times.load_ended(self, num_loaded, seconds, by_tier)
        if num_loaded < plan.num_tokens:
            self._note_loss(plan, num_loaded, ends, reason)
            self.give_up(reason)
            self.num_saved = min(self.num_saved, num_loaded)  # so a save heals the rest
        if self._phase not in PROMPT_GIVEN:  # else its client has a first token already
            self.cache.metrics.exposed_seconds.observe(self.timer.elapsed_s)
        self.num_saved = max(self.num_saved, num_loaded)
        return num_loaded

    def give_up(self, reason: Reason = Reason.FAULT) -> None:
        """Gives up the lookup and the loads of this request, because something failed.

        The engine need not wait for the lookup any more. But a load that has begun may write its
        blocks until its jobs are done.
        """
        if self._lookup is not None:
            self._lookup.cancel()
        if self._phase is RequestPhase.LOOKUP:
            self.timer.end("wait")
            self._phase = RequestPhase.FOUND
        if self.prompt_times is not None:
            self.prompt_times.load_ended(self, self.num_present, 0.0)
        self.may_load = False
        if self._load is not None:
            self._note_loss(self._load, self._load.first_token, (), reason)
        self._load = None
        self._shortfall = self._shortfall or reason

    def leave_pool(self) -> None:
        """Makes the request neither load nor save nor hand over anything from now on.

        An adapter calls it if the request's KV may not be what its keys name.
        """
        self._check("leave_pool")
        self._has_left = True
        self.give_up(Reason.NAMESPACE)

    @property
    def reason(self) -> Reason | None:
        """The reason why less than all was found or loaded so far; None if nothing is missing."""
        return self._shortfall or (self.found.reason if self.found is not None else None)

    @property
    def failure(self) -> Reason | None:
        """The reason why the request must end now, because its hand-off fell short.

        None if the request may go on, which is always so unless PDSTORE_ON_MISS is `fail`.
        """
        must_load = self.given is not None and self.settings.on_miss == "fail"
        return self.reason if must_load else None

    def begin_step(self, start: int, stop: int, *, runs_draft: bool = True) -> None:
        """Counts what a step computes, up to index `stop` - 1, with a draft's rows or without."""
        self._check("begin_step")
        self.drafts.begin_step(start, stop, runs_draft=runs_draft)
        self._serve()
        self._is_past = stop >= (end := self.keys.num_tokens)
        if self._phase in PROMPT_GIVEN:
            return
        self._phase = RequestPhase.PREFILLED if self._is_past else RequestPhase.PREFILLING
        if start >= end:
            return
        self.timer.begin("compute")
        self.num_prefill_tokens += min(stop, end) - start
        if self.prompt_times is not None:
            self.prompt_times.begin_step(self, start, min(stop, end))

    def end_prompt(self) -> None:
        """Notes that the answer has its first token.

        A second call does nothing. An adapter calls it for a step's requests before the next step.
        """
        self._check("end_prompt")
        before, self._phase = self._phase, RequestPhase.ANSWERING
        if before is RequestPhase.ANSWERING:
            return
        self.timer.end("compute")
        if self.prompt_times is None:
            return
        if before is RequestPhase.FOUND:  # an earlier use of the pool had the prompt's steps
            self.prompt_times.forget(self)
        else:
            self.prompt_times.end_prompt(self)

    def plan_save(self, start: int, stop: int, state_ends: Collection[int] = ()) -> SavePlan | None:
        """Returns the plan of the save of what a step computes of the prompt, or None.

        If layers keep states, the save ends at a state, because nobody can go on anywhere else. But
        KV of a hand-off may go before its state, without which the hand-off is never published.

        start, stop: as `begin_step` takes them.
        state_ends: the numbers of tokens, up to `stop`, after which this step leaves a state that
          no later step overwrites.
        """
        self._check("plan_save")
        if not self._is_prompt_pending:
            return None
        if self.handoff is not None and not self.num_saved:
            # what the engine had was saved earlier; the last save stores again what the store lost
            self.num_saved = start - start % self.keys.block_tokens
        if self.handoff is not None and self._first_save is None and self.found is not None:
            self.num_saved = self.found.num_above(self.num_saved)  # D may look nowhere else
        end = min(stop, self._end_of_saves)
        if not self._has_states:
            return self._plan_save(self.keys.prefix(end))
        ends = [at for at in state_ends if at <= end and self.keys.prefix(at).num_tokens == at]
        if self.handoff is None or end == self.keys.num_tokens:
            end = max(ends, default=0)
        return self._plan_save(self.keys.prefix(end), ends)

    @property
    def junction(self) -> int:
        """The end of the blocks that the pool has, but no state after them; 0 if it lacks none.

        If a step ends there, its state is saved for all prompts that begin with these tokens.
        """
        if self.found is None or not self._is_prompt_pending:
            return 0
        end = self.found.num_shared
        return end if end > max(self.found.num_tokens, self.num_present) else 0

    def plan_answer_save(self, stop: int, token_ids: Sequence[int]) -> SavePlan | None:
        """Returns the plan of the save of the answer's whole blocks, or None; call it before `end`.

        stop: leading tokens of prompt and answer whose KV is computed, so without the last one. If
          layers keep states: the last end of a block at which the engine still has the state.
        token_ids: token ids of the prompt and then the answer, at least up to `stop`.
        """
        self._check("plan_answer_save")
        rest = stop % self.keys.block_tokens
        end = 0 if rest and self._has_states else stop - rest
        if self._load or self._shortfall or not self.settings.save_decoded or end <= self.num_saved:
            return None  # an engine may count tokens as computed that a load should have brought
        keys = self.keys.prefix(self.keys.num_tokens - 1)
        keys.extend(list(token_ids[keys.num_tokens : end]))
        return self._plan_save(keys.prefix(end), [end] if self._has_states else [])

    def end(self) -> HandoffId | None:
        """Ends the request; returns a hand-off that no save publishes: the caller must abort it."""
        self._check("end")
        if self.prompt_times is not None:
            self.prompt_times.forget(self)
        if self._lookup is not None:
            self._lookup.cancel()
        if self._phase is not RequestPhase.ANSWERING:
            self.timer.end("compute")
        self._phase = RequestPhase.ENDED
        self._load = None
        return None if self.is_published else self.handoff

    @property
    def is_settled(self) -> bool:
        """True if steps save nothing more; then an adapter need not call `begin_step`.

        Steps after the prompt's last one leave no state of the prompt.
        """
        may_save = self._is_prompt_pending and not (self._has_states and self._is_past)
        return self._phase is RequestPhase.ANSWERING and not may_save

    @property
    def answer(self) -> dict[str, Json]:
        """The `kv_transfer_params` of P's answer; empty if no save publishes the hand-off."""
        return self._answer if self.is_published else {}

    @property
    def decided(self) -> dict[str, Json]:
        """The choice to load or to compute, for the answer; empty if they were not compared."""
        return {} if self.decision is None else {"decision": self.decision.way}

    @property
    def _is_prompt_pending(self) -> bool:
        """True while some of the prompt must be saved, or its hand-off published; never in D."""
        is_saved = self.num_saved >= self._end_of_saves
        is_published = self.is_published or self.handoff is None
        if self._has_left or self.settings.role == "decode":
            return False
        return not (is_saved and is_published)

    @property
    def _end_of_saves(self) -> int:
        """The tokens of the prompt to save. Without a hand-off, a longer prompt needs no tail."""
        end = self.keys.num_tokens
        return end if self.handoff is not None else end - end % self.keys.block_tokens

    def _take(self, found: Match) -> None:
        """Goes by this answer from now on."""
        self.found = found
        if self.handoff is None and found.follow is None and self._first_save is None:
            self.num_saved = found.num_tokens  # also what the engine has anyway

    def _serve(self) -> None:
        """Ends the renewals, because the request uses what it has found."""
        if self._lookup is not None and self.found is not None:
            self._lookup.serve(self.found)
            self._is_looking = False

    def _check(self, call: str) -> None:
        check_call(call, self.phase, self.id)

    def _note_loss(
        self, plan: LoadPlan, num_loaded: int, ends: Sequence[JobEnd], reason: Reason
    ) -> None:
        """Counts what a load was to bring and has not brought, and notes why."""
        assert self.found is not None, "a load without a match"
        found_at, lease_s = self.found.found_at, self.cache.lease_s
        self.loss = loss_of(plan, num_loaded, ends, reason, found_at=found_at, lease_s=lease_s)
        self.cache.metrics.tokens.labels("lost").inc(self.loss.num_lost)

    def _load_ends(self) -> list[JobEnd]:
        return [e for e in self.ends[self._num_earlier_ends :] if e.direction is Direction.LOAD]

    def _plan_save(self, keys: PromptKeys, state_ends: Collection[int] = ()) -> SavePlan | None:
        """Returns the save of the new tokens of `keys`; the prompt's last save publishes it."""
        is_last = self._is_prompt_pending and keys.num_tokens == self.keys.num_tokens
        handoff = self.handoff if is_last else None
        if keys.num_tokens <= self.num_saved and handoff is None:
            return None
        first_token, is_awaited = min(self.num_saved, keys.num_tokens), self.handoff is not None
        self.num_saved = max(self.num_saved, keys.num_tokens)
        if not is_awaited and self._shortfall is None:  # a shortfall is mended at once
            ends = [end for end in state_ends if end > first_token]
            first_block = self.cache.claim(keys, first_token // keys.block_tokens, ends)
            first_token = max(first_token, keys.end_of(first_block))
            if first_token == keys.num_tokens:
                return None
        now = time.monotonic()
        first_save = self._first_save = self._first_save or PromptSave(first_token, now)
        announce, self._announce = self._announce, None
        plan = SavePlan(
            keys,
            first_token,
            handoff,
            announce,
            is_awaited,
            first_save,
            waited_s=now - self._asked_at,
            ends_prompt=keys.num_tokens == self._end_of_saves,
            drafts_from=self.drafts.first_own or 0,
        )
        self.is_published |= handoff is not None
        self.num_jobs += self.num_ranks
        return plan
