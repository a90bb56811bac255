"""PDStoreConnectorScheduler: the connector's scheduler side, which uses PrefixCacheManager.

A lookup starts in one step of vLLM, which waits a moment for its answer. If no answer comes, later
steps ask again. The workers get their loads and saves in the metadata of a step.
"""

# Decision: docs/decisions/032-vllm-failed-loads.md
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdstore.adapters.vllm.contents import Content, Contents
from pdstore.adapters.vllm.describe import (
    drop_last_token,
    drops_last_token,
    keys_of,
    params_of,
    why_bypassing,
)
from pdstore.adapters.vllm.events import PoolEvents
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    SaveSpec,
    StepReport,
)
from pdstore.adapters.vllm.saves import Saves
from pdstore.adapters.vllm.stats import WorkerMetrics
from pdstore.adapters.vllm.tables import BlockIds, Tables, longest_of
from pdstore.adapters.vllm.weights import KnownWeights
from pdstore.engine.phase import RequestPhase
from pdstore.engine.record import Records
from pdstore.engine.request import EngineRequest
from pdstore.errors import Direction, IllegalCall, Reason
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import Json
from pdstore.format.plan import LoadPlan
from pdstore.metrics import Metrics
from pdstore.scheduler.break_even import PromptTimes
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.status.server import Reporting
from pdstore.telemetry.reasons import Repeats
from pdstore.telemetry.request_record import Journal

log = logging.getLogger("vllm.pdstore")


@dataclass(eq=False)
class PDStoreConnectorScheduler:
    """Tracks requests: their lookups, loads, saves and hand-offs. Only one thread may call it.

    Until `set_layouts` is called, every prompt is a miss, and nothing is saved.

    may_follow: as `EngineRequest` takes it.
    number: this instance's number among the data-parallel instances that start together.
    contents: makes digests of requests' images, sounds, videos and LoRA adapters.
    weights_of, longest_prompt: as `PrefixCacheManager` takes them.
    longest_drafted: a step with a longer sequence does not run the draft model; None: all do.
    events: tells routers what the pool has, if vLLM publishes events.
    step_timeout_s: how long a step waits, in all, for answers to its new lookups. A store on this
      host answers in about a millisecond if the prompt is long. A request whose lookup has no
      answer in time waits for the next step, and steps may be long.

    cache: finds what the pool has of prompts; None before `set_layouts`.
    saves: the planner of the saves. Its `block_pool` must be set to vLLM's BlockPool, whose
      reference counts keep the blocks of saves allocated.
    """

    settings: Settings
    num_ranks: int
    metrics: Metrics
    may_follow: bool = True
    number: int = 0
    contents: Contents = field(default_factory=Contents)
    weights_of: Callable[[Settings], str] | None = None
    longest_prompt: int | None = None
    longest_drafted: int | None = None
    events: PoolEvents = field(default_factory=PoolEvents)
    step_timeout_s: float = 0.003

    def __post_init__(self) -> None:
        self.worker_metrics = WorkerMetrics()
        self.saves = Saves(self.num_ranks)
        self._weights = KnownWeights(self.num_ranks)
        self.cache: PrefixCacheManager | None = None
        self._prompt_times: PromptTimes | None = None  # None: load all that is found
        self._reporting: Reporting | None = None
        self._records = Records(Journal(), self.settings.role)
        self._requests: dict[str, tuple[Any, EngineRequest]] = {}
        self._bypassing: set[str] = set()
        self._repeats = Repeats()
        self._unsettled: set[str] = set()  # the requests that a step must look at
        self._step_timeout_left_s = self.step_timeout_s
        self._loads: list[tuple[str, LoadPlan | None, Tables, int]] = []
        self._aborted: list[HandoffId] = []
        self._answers: list[SaveSpec] = []

    def set_layouts(self, ranks: Sequence[RankLayout]) -> None:
        """Takes the workers' layouts. Raises ConfigError if there are none or they differ."""
        layout = RankLayout.common(ranks)
        namespace = layout.namespace
        self.saves.block_tokens = layout.block_tokens
        self.saves.states = layout.states
        cache = self.cache = PrefixCacheManager(
            self.settings,
            namespace,
            metrics=self.metrics,
            longest_prompt=self.longest_prompt,
            weights_of=self.weights_of,
        )
        self._prompt_times = PromptTimes.from_settings(self.settings, namespace, self.metrics)
        self._reporting = Reporting(
            self.settings,
            cache,
            [self.metrics.registry, self.worker_metrics.registry],
            lambda: cache.problem or self.worker_metrics.problem,
            self.number,
        )
        self._records = Records(self._reporting.journal, self.settings.role)
        self.events.begin(cache, layout.block_tokens, self.saves.block_pool)
        words = "pdstore: role %s, namespace %s, blocks of %d tokens"
        log.info(words, self.settings.role, namespace.hex, namespace.block_tokens)

    def add(self, request: Any) -> EngineRequest | None:
        """Starts the lookup of a new request, as soon as the digests for its keys are known.

        Returns None if they are not known yet, or if the request must not use the pool.
        """
        known = self._requests.get(request.request_id)
        if known is not None or self.cache is None or request.request_id in self._bypassing:
            return known and known[1]
        content = self.contents.content_of(request)
        if not (content.is_known and self._may_use_pool(request)):
            return None
        keys = keys_of(request, self.cache, content)
        if keys is None:
            self._bypass(request, self.cache)
            return None
        headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
        state = EngineRequest(
            self.cache,
            self.settings,
            keys,
            params_of(request),
            id=request.request_id,
            traceparent=headers.get("traceparent"),
            prompt_times=self._prompt_times,
            may_load=not getattr(request, "skip_reading_prefix_cache", False),
            may_follow=self.may_follow,
            num_ranks=self.num_ranks,
        )
        self._requests[request.request_id] = request, state
        self._unsettled.add(request.request_id)
        return state

    def arrive(self, request: Any) -> None:
        """Takes a new request; vLLM calls it once, before it looks anything up.

        Where layers have states, P computes all of a prompt but its last token, because D computes
        that token itself, and goes on from the state before it.
        """
        if self.cache is not None and drops_last_token(request, self.cache):
            drop_last_token(request)
        self.add(request)

    def num_found(self, request: Any, num_computed: int) -> int | None:
        """Returns how many tokens after `num_computed` can be loaded; None if not known yet."""
        began = time.monotonic()
        content = self._content_of(request)
        state = self.add(request) if content.is_known else None
        if state is None:
            return 0 if content.is_known else None
        if num_computed and self._weights.is_cache_stale:
            state.leave_pool()  # what vLLM's own cache has may be KV of earlier weights
        if not content.may_share:
            state.leave_pool()
        is_known = state.poll(self._step_timeout_left_s)
        self._step_timeout_left_s = max(0.0, self._step_timeout_left_s - (time.monotonic() - began))
        if not is_known:
            return None
        self._unsettled.add(state.id)  # again, if it was preempted: its next step ends its wait
        num_tokens = int(request.num_tokens)
        end = state.find(num_computed, num_tokens)
        self._mark_junction(request, state)
        if state.may_load and state.failure is not None and num_computed < num_tokens - 1:
            return num_tokens - 1 - num_computed  # promise a load: only a load can fail
        return end - num_computed

    def tell_found(self, request: Any) -> None:
        """Tells routers what a request has found, once vLLM has blocks for it.

        Until then vLLM asks `num_found` again at every step, and telling walks a whole prompt.
        """
        if (known := self._requests.get(request.request_id)) is not None:
            self.events.found(request, known[1].found)

    def load(self, request: Any, block_ids: BlockIds, num_external: int) -> None:
        """Queues the load that `num_found` promised, into the blocks that vLLM has allocated."""
        request_id = request.request_id
        _, state = self._requests[request_id]
        if state.failure is not None:
            words = "%s fails, because its hand-off fell short: %s"
            log.warning(words, request_id, state.failure.value)
            self.fail_load(request_id, block_ids, num_external)
            return
        end = state.num_present + num_external  # vLLM may want fewer tokens than it was offered
        states = {end: self.saves.states.at(block_ids, end)} if self.saves.states else {}
        if not all(states.values()):
            log.warning("%s fails: vLLM has no blocks for the states after its load", request_id)
            self.fail_load(request_id, block_ids, num_external)
            return
        room = len(self.saves.states.token_table(block_ids)) * self.saves.block_tokens
        plan = state.plan_load(end, room)
        num_blocks = self._blocks_of(plan.keys.num_tokens)
        tables = self.saves.states.message(block_ids, num_blocks, states)
        self._loads.append((request_id, plan, tables, request.num_tokens - end))
        self._unsettled.add(request_id)  # again, if it was preempted: a save heals what is missing

    def fail_load(self, request_id: str, block_ids: BlockIds, num_external: int) -> None:
        """Queues a load that loads nothing, because vLLM waits for the report of a load's end."""
        if (known := self._requests.get(request_id)) is not None:
            known[1].give_up()
        num_blocks = len(self.saves.states.token_table(block_ids))
        first = num_blocks - self._blocks_of(num_external)
        tables = self.saves.states.message([table[first:] for table in block_ids], num_blocks)
        self._loads.append((request_id, None, tables, num_external))

    def add_loads(self, metadata: PDStoreConnectorMetadata) -> None:
        """Adds the queued loads, saves of answers and aborted hand-offs to a step's metadata."""
        self._step_timeout_left_s = self.step_timeout_s
        loads, self._loads = self._loads, []
        metadata.loads += (LoadSpec(*load, self._weights.generations) for load in loads)
        metadata.saves, self._answers = self._answers, []
        metadata.aborted_handoffs, self._aborted = self._aborted, []

    def add_saves(self, metadata: PDStoreConnectorMetadata, output: Any) -> None:
        """Adds the saves of a step to its metadata. output: vLLM's SchedulerOutput."""
        metadata.step = self._weights.number_step(computes=bool(output.num_scheduled_tokens))
        metadata.question = self._weights.question
        self.saves.begin_step(output)  # a step that computes nothing may preempt a request
        if not output.num_scheduled_tokens:
            return
        scheduled = [
            (*self._requests[request_id], num_tokens)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if request_id in self._unsettled
        ]
        for request, state, _ in scheduled:
            if request.num_output_tokens:
                with self._bypassing_if_illegal():
                    state.end_prompt()
        runs_draft = self.longest_drafted is None or longest_of(output) <= self.longest_drafted
        for request, state, num_tokens in scheduled:
            start = request.num_computed_tokens
            with self._bypassing_if_illegal():
                state.begin_step(start, start + num_tokens, runs_draft=runs_draft)
                planned = self.saves.plan(state, request, num_tokens)
                metadata.saves += self.events.planned(request, planned)
        if not runs_draft:
            self._skip_drafts(output, but={state.id for _, state, _ in scheduled})
        self._unsettled -= {state.id for _, state, _ in scheduled if state.is_settled}
        self._hold_answer_states()

    def report(self, report: StepReport) -> None:
        """Handles a report from some ranks: frees blocks that are saved, and ends loads."""
        if report.weights and self._weights.add_reports(report.weights):
            self._weights_written()
        if report.weights and self.cache is not None:
            self.cache.use_weights(self._weights.digest)
        self.saves.release_blocks(report.released)
        for end in report.ended:
            self.events.job_ended(end)
            known = self._requests.get(end.request_id)
            state = known[1] if known else self._records.ended_request(end.request_id)
            if state is not None:
                self._records.job_ended(state, end)
                if known and end.direction is Direction.LOAD and not state.is_loading:
                    state.end_load()

    def finish_request(self, request: Any, block_ids: BlockIds = ()) -> dict[str, Json] | None:
        """Forgets a request that has ended. Returns the `kv_transfer_params` of P's answer."""
        request_id = request.request_id
        self._unsettled.discard(request_id)
        self._bypassing.discard(request_id)
        self.contents.forget(request_id)
        if (known := self._requests.pop(request_id, None)) is None:
            self.saves.forget(request_id)
            return None
        _, state = known
        try:
            if request.num_output_tokens and state.phase is not RequestPhase.LOOKUP:
                state.end_prompt()
                planned = self.saves.plan_answer(state, request, block_ids)
                self._answers += self.events.planned(request, planned)
        finally:  # else what it has found would be renewed for ever
            self.saves.forget(request_id)
            has_answer = self._end(state)
        if not has_answer:
            return None
        decided: dict[str, Json] = {"pdstore_decision": state.decided} if state.decided else {}
        return {**state.answer, **decided} or None

    def bypass(self, error: IllegalCall) -> None:
        """Ends a request's use of the pool, because vLLM called in an order that pdstore rejects.

        Its running loads and saves go on, and are reported to vLLM as usual.
        """
        if error.request_id in self._bypassing:
            return
        words = "request %s bypasses the pool after an illegal call"
        log.exception(words, error.request_id, exc_info=error)
        self.metrics.miss(Reason.FAULT)
        if (known := self._requests.pop(error.request_id, None)) is None:
            return  # the call was made for its end, so there is nothing left to end
        self._unsettled.discard(error.request_id)
        self._bypassing.add(error.request_id)
        _, state = known
        self._end(state)

    @property
    def is_at_work(self) -> bool:
        """True if vLLM must go on with steps even if it has no request."""
        is_working = self._records.has_running_jobs()
        return bool(self._aborted or self.saves or self.events or is_working)

    def reset(self) -> bool:
        """Leaves the pool as it is, because other instances use it too; returns True.

        vLLM resets its caches around an update of the weights, so each rank is asked about them.
        """
        self._weights.reset(is_cache_empty=self.saves.is_cache_empty)
        return True

    def close(self) -> None:
        self._records.close()
        self.contents.close()
        self.events.close()
        for each in (self.cache, self._reporting):
            if each is not None:
                each.close()

    @contextlib.contextmanager
    def _bypassing_if_illegal(self) -> Iterator[None]:
        """Makes an illegal call for one request in here cost no other request anything."""
        try:
            yield
        except IllegalCall as error:
            self.bypass(error)

    def _end(self, state: EngineRequest) -> bool:
        """Ends a request's state; returns False if that aborts its hand-off."""
        aborted = state.end()
        self._records.end_request(state)
        if aborted is not None:
            self._aborted.append(aborted)
        return aborted is None

    def _mark_junction(self, request: Any, state: EngineRequest) -> None:
        """Makes vLLM keep a state where a prompt parts from others that are in the pool.

        The next prompt that parts there goes on from that state.
        """
        junction = state.junction - state.junction % self.saves.states.entry_tokens
        if self.saves.states.keeps_ends and junction > request.shared_prefix_boundary:
            request.shared_prefix_boundary = junction

    def _skip_drafts(self, output: Any, but: set[str]) -> None:
        """Notes that a step computes no draft's rows, in requests whose answers are saved later."""
        for request_id in output.num_scheduled_tokens.keys() - but:
            if (known := self._requests.get(request_id)) is not None:
                request, state = known
                start = request.num_computed_tokens
                stop = start + output.num_scheduled_tokens[request_id]
                state.drafts.begin_step(start, stop, runs_draft=False)

    def _hold_answer_states(self) -> None:
        """Holds states in answers, of which vLLM says when they are computed and not at the end."""
        if not self.settings.save_decoded:
            return
        for request_id in self.saves.with_named_states:
            request, _ = self._requests.get(request_id, (None, None))
            if request is not None and request.num_output_tokens:
                self.saves.hold_answer_states(request)

    def _content_of(self, request: Any) -> Content:
        """Returns the digests of a request that vLLM would compute now, if they are known.

        vLLM does not wait for them if a request asks for the log probabilities of its prompt.
        """
        waits = not getattr(request, "skip_reading_prefix_cache", False)
        content = self.contents.content_of(
            request, self._step_timeout_left_s, must_decide=not waits
        )
        for request_id in self.contents.pop_distrusted():
            if (known := self._requests.get(request_id)) is not None:
                known[1].leave_pool()
        return content

    def _bypass(self, request: Any, cache: PrefixCacheManager) -> None:
        """Leaves a request alone; a D that was asked at the same time need not wait for P."""
        self._bypassing.add(request.request_id)
        unsure = "it is not certain what its images, sounds, videos or adapter contain"
        why = why_bypassing(request, cache) or unsure
        if (left_out := self._repeats.note(why)) is not None:
            log.info("request %s bypasses the pool: %s%s", request.request_id, why, left_out)
        asked = params_of(request)
        if asked.handoff is not None and cache.is_prefill(asked):
            self._aborted.append(asked.handoff.id)

    def _may_use_pool(self, request: Any) -> bool:
        """Returns False if weights were written and a new request's KV may be of the earlier ones.

        vLLM keeps what encoders made of images, sounds and videos, and does not say for how long.
        """
        weights = self._weights
        has_items = bool(getattr(request, "mm_features", None))
        return weights.is_known and not (weights.generations and has_items)

    def _weights_written(self) -> None:
        """Takes all requests out of the pool whose KV may be of earlier weights, or has begun."""
        self.saves.weights = self._weights.generations
        self.events.forget()
        for request_id, (request, state) in list(self._requests.items()):
            if state.num_jobs or request.num_computed_tokens:
                state.leave_pool()
            else:  # it gets new keys when vLLM asks about it
                state.end()
                del self._requests[request_id]
                self._unsettled.discard(request_id)
        digest = self._weights.digest.hex()
        log.warning(
            "weights were written in place: KV is %s from now on; requests that have begun are"
            " neither loaded nor saved%s",
            f"named by their digest {digest[:8]}" if digest else "named as at the start",
            ". vLLM's own cache may have KV of the earlier weights: requests that use it bypass the"
            " pool until POST /reset_prefix_cache?reset_external=true"
            if self._weights.is_cache_stale
            else "",
        )

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.saves.block_tokens)
