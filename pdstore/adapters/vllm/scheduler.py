"""PDStoreConnectorScheduler: the connector's scheduler side, on PrefixCacheManager.

A lookup is started in one step and polled in later ones; a step waits a moment for first answers.
The workers get their loads and saves with the metadata of a step.
"""

# Decision: docs/decisions/032-vllm-failed-loads.md
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pdstore.adapters.vllm.describe import keys_of
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    StepReport,
    tables_of,
)
from pdstore.adapters.vllm.saves import Saves
from pdstore.adapters.vllm.stats import WorkerMetrics
from pdstore.engine.record import Records
from pdstore.engine.request import EngineRequest, PromptTimes
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.namespace import Json
from pdstore.metrics import Metrics
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.status.reporting import Reporting
from pdstore.telemetry.request_record import Journal

log = logging.getLogger("vllm.pdstore")

_PATIENCE_S = 0.001


class PDStoreConnectorScheduler:
    """Tracks requests: their lookups, loads, saves and hand-offs. One thread calls it.

    Until `set_layouts` gets the workers' layouts, all misses and nothing is saved.

    may_follow: load a hand-off while P is still saving it. Without it, D waits until P is done: for
      engines in which a load that brings too little fails its request.
    number: of this instance among the data-parallel ones that are started together.
    hashes_items: False if requests with images, sounds or videos must not use the pool.
    weights_of, longest_prompt: as `PrefixCacheManager` takes them.
    patience_s: time for the first answers of all lookups of one step. A near store answers in a
      fraction of a millisecond, and else a request waits for the next step, which may be long.
    """

    def __init__(
        self,
        settings: Settings,
        num_ranks: int,
        metrics: Metrics,
        *,
        may_follow: bool = True,
        number: int = 0,
        hashes_items: bool = True,
        weights_of: Callable[[Settings], str] | None = None,
        patience_s: float = _PATIENCE_S,
        longest_prompt: int | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._may_follow = may_follow
        self._num_ranks = num_ranks
        self._number = number
        self._hashes_items = hashes_items
        self._open = partial(
            PrefixCacheManager,
            settings,
            metrics=metrics,
            longest_prompt=longest_prompt,
            weights_of=weights_of,
        )
        self.worker_metrics = WorkerMetrics()
        self._cache: PrefixCacheManager | None = None
        self._prompt_times: PromptTimes | None = None  # None where nothing is decided
        self._reporting: Reporting | None = None
        self._records = Records(Journal(), settings.role)
        self._block_pool: Any = None
        self._block_tokens = 0  # of vLLM's blocks
        self._saves: Saves | None = None
        self._requests: dict[str, tuple[Any, EngineRequest]] = {}
        self._patience_s = self._patience_left_s = patience_s
        self._loads: list[LoadSpec] = []
        self._aborted_handoffs: list[HandoffId] = []

    def set_layouts(self, ranks: Sequence[RankLayout]) -> None:
        """Begins with the workers' layouts. Raises ConfigError if there are none or they differ."""
        layout, role = RankLayout.common(ranks), self._settings.role
        namespace = layout.namespace
        self._block_tokens = layout.block_tokens
        cache = self._cache = self._open(namespace)
        self._prompt_times = PromptTimes.from_settings(self._settings, namespace, self._metrics)
        self._reporting = Reporting(
            self._settings,
            cache,
            [self._metrics.registry, self.worker_metrics.registry],
            lambda: cache.problem or self.worker_metrics.problem,
            self._number,
        )
        self._records = Records(self._reporting.journal, role)
        self._open_saves()
        words = "pdstore: role %s, namespace %s, blocks of %d tokens"
        log.info(words, role, namespace.hex, namespace.block_tokens)

    def bind(self, block_pool: Any) -> None:
        """Gives vLLM's BlockPool, whose reference counts hold the blocks of saves."""
        self._block_pool = block_pool
        self._open_saves()

    def add(self, request: Any) -> EngineRequest | None:
        """Starts the lookup of a new request. Returns None for one that must not use the pool."""
        known = self._requests.get(request.request_id)
        if known is not None or self._cache is None:
            return known and known[1]
        keys = keys_of(request, self._cache, self._hashes_items)
        if keys is None:
            return None
        headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
        state = EngineRequest(
            self._cache,
            self._settings,
            keys,
            _params_of(request),
            id=request.request_id,
            traceparent=headers.get("traceparent"),
            prompt_times=self._prompt_times,
            may_load=not getattr(request, "skip_reading_prefix_cache", False),
            may_follow=self._may_follow,
            num_ranks=self._num_ranks,
        )
        self._requests[request.request_id] = request, state
        return state

    def num_found(self, request: Any, num_computed: int) -> int | None:
        """Tokens behind the first `num_computed` that can be loaded; None while it is unknown."""
        state = self.add(request)
        if state is None:
            return 0
        began = time.monotonic()
        is_known = state.poll(self._patience_left_s)
        self._patience_left_s = max(0.0, self._patience_left_s - (time.monotonic() - began))
        if not is_known:
            return None
        num_tokens = int(request.num_tokens)
        if state.may_load and state.failure is not None and num_computed < num_tokens - 1:
            return num_tokens - 1 - num_computed  # for blocks whose load can fail
        return state.find(num_computed, num_tokens) - num_computed

    def load(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Queues the load that `num_found` promised, into the blocks that vLLM has allocated."""
        request_id = request.request_id
        _, state = self._requests[request_id]
        if state.failure is not None:
            log.warning("%s fails: its hand-off fell short: %s", request_id, state.failure.value)
            self.fail_load(request_id, block_ids, num_external)
            return
        end = state.num_present + num_external  # vLLM may want fewer tokens than it was offered
        plan = state.plan_load(end, len(block_ids[0]) * self._block_tokens)
        tables = tables_of(block_ids, self._blocks_of(plan.keys.num_tokens))
        self._loads.append(LoadSpec(request_id, plan, tables))

    def fail_load(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Queues a load that loads nothing: vLLM waits until the workers report its end."""
        if (known := self._requests.get(request_id)) is not None:
            known[1].give_up()
        first = len(block_ids[0]) - self._blocks_of(num_external)
        behind = [table[first:] for table in block_ids]
        self._loads.append(LoadSpec(request_id, None, tables_of(behind, len(behind[0]))))

    def build_metadata(self) -> PDStoreConnectorMetadata:
        """Returns the queued loads and aborts; `add_saves` adds the saves."""
        self._patience_left_s = self._patience_s
        metadata = PDStoreConnectorMetadata(self._loads, aborted_handoffs=self._aborted_handoffs)
        self._loads = []
        self._aborted_handoffs = []
        return metadata

    def add_saves(self, metadata: PDStoreConnectorMetadata, output: Any) -> None:
        """Adds the saves of what a step computes. output: vLLM's SchedulerOutput."""
        if not output.num_scheduled_tokens:
            return
        if self._saves is not None:
            self._saves.begin_step(output)
        scheduled = [
            (*self._requests[request_id], num_tokens)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if request_id in self._requests
        ]
        for request, state, _ in scheduled:
            if request.num_output_tokens:
                state.end_prompt()
        for request, state, num_tokens in scheduled:
            start = request.num_computed_tokens
            state.begin_step(start, start + num_tokens)
            if self._saves is not None:
                metadata.saves += self._saves.plan(state, request, num_tokens)

    def report(self, report: StepReport) -> None:
        """Handles what has ended on some ranks: releases saved blocks, and ends loads."""
        if self._saves is not None:
            self._saves.release(report.released)
        for end in report.ended:
            known = self._requests.get(end.request_id)
            state = known[1] if known else self._records.ended_request(end.request_id)
            if state is not None:
                self._records.job_ended(state, end)
                if known and not state.is_loading:
                    state.end_load()

    def finish(self, request: Any) -> dict[str, Json] | None:
        """Forgets a request that has ended. Returns the `kv_transfer_params` of P's answer."""
        request_id = request.request_id
        if self._saves is not None:
            self._saves.end_request(request_id)
        if (known := self._requests.pop(request_id, None)) is None:
            return None
        _, state = known
        if request.num_output_tokens:
            state.end_prompt()
        aborted = state.end()
        self._records.end_request(state)
        if aborted is not None:
            self._aborted_handoffs.append(aborted)
            return None
        decided: dict[str, Json] = {"pdstore_decision": state.decided} if state.decided else {}
        return {**state.answer, **decided} or None

    @property
    def is_at_work(self) -> bool:
        """True while vLLM must keep stepping although it has no request."""
        return bool(self._aborted_handoffs or self.holds_blocks or self._records.has_running_jobs())

    @property
    def holds_blocks(self) -> bool:
        """True while a save holds blocks, which come back without a preemption."""
        return bool(self._saves)

    def reset(self) -> bool:
        """Clears this namespace in the pool; False if that failed."""
        return self._cache is None or self._cache.clear()

    def close(self) -> None:
        self._records.close()
        for each in (self._cache, self._reporting):
            if each is not None:
                each.close()

    def _open_saves(self) -> None:
        """Begins to save once both the layout and vLLM's pool are known."""
        if self._block_pool is not None and self._block_tokens:
            self._saves = Saves(self._block_pool, self._block_tokens, self._num_ranks)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


def _params_of(request: Any) -> Mapping[str, Json] | None:
    """Returns `kv_transfer_params`; None, with a warning, if their hand-off is malformed."""
    params: Mapping[str, Json] | None = request.kv_transfer_params
    try:
        Handoff.of(params)
    except ValueError as error:
        log.warning("%s is taken without a hand-off: %s", request.request_id, error)
        return None
    return params
