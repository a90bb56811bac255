"""PDStoreConnectorScheduler: the connector's scheduler side, on PrefixCacheManager.

A lookup is started in one step and polled in later ones; a step waits a moment for first answers.
The workers get their loads and saves with the metadata of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pdstore.adapters.vllm.block_refs import BlockRefs
from pdstore.adapters.vllm.block_tables import pool_tables
from pdstore.adapters.vllm.idle_steps import IdleSteps
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    StepReport,
)
from pdstore.adapters.vllm.patience import Patience
from pdstore.adapters.vllm.prompt_steps import PromptSteps
from pdstore.adapters.vllm.records import Records
from pdstore.adapters.vllm.request import RequestTracker, keys_of
from pdstore.adapters.vllm.saves import SavePlanner
from pdstore.adapters.vllm.stats import WorkerMetrics
from pdstore.format.handoff import Handoff, HandoffId
from pdstore.format.namespace import Json
from pdstore.metrics import Metrics
from pdstore.outcome import Direction
from pdstore.scheduler.break_even import BreakEven
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings
from pdstore.status.reporting import Reporting
from pdstore.telemetry.journal import Journal

log = logging.getLogger("vllm.pdstore")


class PDStoreConnectorScheduler:
    """Tracks requests: their lookups, loads, saves and hand-offs. One thread calls it.

    Inactive until `begin` gets the workers' layout: until then all misses and nothing is saved.

    may_follow: load a hand-off while P is still saving it. Without it, D waits until P is done: for
      engines in which a load that brings too little fails its request.
    number: of this instance among the data-parallel ones that are started together.
    hashes_items: False if requests with images, sounds or videos must not use the pool.
    weights_of: as `PrefixCacheManager` takes it.
    patience: for lookups that vLLM asks for the first time.
    idle_steps: for the jobs that vLLM waits for.
    longest_prompt: as `PrefixCacheManager` takes it.
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
        patience: Patience | None = None,
        idle_steps: IdleSteps | None = None,
        longest_prompt: int | None = None,
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._may_follow, self._num_ranks, self._number = may_follow, num_ranks, number
        self._hashes_items = hashes_items
        self._open = partial(
            PrefixCacheManager,
            settings,
            metrics=metrics,
            longest_prompt=longest_prompt,
            weights_of=weights_of,
        )
        self._cache: PrefixCacheManager | None = None
        self._saves: SavePlanner | None = None
        self._break_even = BreakEven(settings.load, 1)
        self._steps = PromptSteps(self._break_even)
        self.worker_metrics = WorkerMetrics()
        self._reporting: Reporting | None = None
        self._records = Records(Journal(), settings.role)
        self._refs: BlockRefs | None = None
        self._block_tokens = 0  # of vLLM's blocks
        self._requests: dict[str, RequestTracker] = {}
        self._patience, self._idle_steps = patience or Patience(), idle_steps or IdleSteps()
        self._loads: list[LoadSpec] = []
        self._aborted_handoffs: list[HandoffId] = []

    def begin(self, ranks: Sequence[RankLayout]) -> None:
        """Begins with the workers' layouts. Raises ConfigError if there are none or they differ."""
        layout, role = RankLayout.common(ranks), self._settings.role
        namespace, self._block_tokens = layout.namespace, layout.block_tokens
        cache = self._cache = self._open(namespace)
        self._break_even = BreakEven(
            self._settings.load,
            namespace.block_tokens,
            may_split=not namespace.windows,
            metrics=self._metrics,
        )
        self._steps = PromptSteps(self._break_even)
        self._reporting = Reporting(
            self._settings,
            cache,
            [self._metrics.registry, self.worker_metrics.registry],
            lambda: cache.problem or self.worker_metrics.problem,
            self._number,
        )
        self._records = Records(self._reporting.journal, role)
        self._plan_saves()
        words = "pdstore: role %s, namespace %s, blocks of %d tokens"
        log.info(words, role, namespace.hex, namespace.block_tokens)

    def bind(self, block_pool: Any) -> None:
        """Takes vLLM's BlockPool, whose reference counts hold the blocks of saves."""
        self._refs = BlockRefs(block_pool, self._num_ranks)
        self._plan_saves()

    def add(self, request: Any) -> RequestTracker | None:
        """Starts the lookup of a new request. Returns None for one that must not use the pool."""
        tracker = self._requests.get(request.request_id)
        if tracker is not None or self._cache is None:
            return tracker
        if (keys := keys_of(request, self._cache, self._hashes_items)) is None:
            return None
        tracker = self._requests[request.request_id] = RequestTracker(request, keys)
        params = tracker.params()
        is_prefill = self._cache.is_prefill(params)
        if is_prefill:
            tracker.handoff, tracker.answer = self._cache.announce(keys, params)
            tracker.is_concurrent = Handoff.of(params) is not None
        if not getattr(request, "skip_reading_prefix_cache", False):
            find = self._cache.follow if self._may_follow else self._cache.lookup
            tracker.timer.begin("wait")
            tracker.lookup = find(keys, None if is_prefill else params)
            tracker.given = None if is_prefill else Handoff.of(params)
            tracker.must_load = tracker.given is not None and self._settings.on_miss == "fail"
        return tracker

    def num_found(self, request: Any, num_computed: int) -> int | None:
        """Tokens behind the first `num_computed` that can be loaded; None while it is unknown."""
        tracker = self.add(request)
        if tracker is None or tracker.lookup is None:
            return 0
        found = tracker.look(self._patience)
        if found is None:
            return None
        tracker.num_computed = num_computed
        if num_computed >= request.num_tokens - 1:
            return 0  # vLLM computes the last token anyway, and would ask for it again and again
        if tracker.must_load and found.reason is not None:
            return int(request.num_tokens) - 1 - num_computed  # for blocks whose load can fail
        usable, follows = max(num_computed, tracker.usable(found)), found.follow is not None
        name, total = request.request_id, request.num_tokens
        decision = self._break_even.decide(
            name, start=num_computed, found=usable, num_tokens=total, follows=follows
        )
        if request.num_output_tokens:  # preempted: `PromptSteps` is not told when it is computed
            self._break_even.forget(name)
        return decision.num_tokens - num_computed

    def load(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Queues the load that `num_found` promised, into the blocks that vLLM has allocated."""
        tracker = self._requests[request.request_id]
        found = tracker.lookup.poll() if tracker.lookup else None
        assert found is not None
        if tracker.must_load and found.reason is not None:
            reason = found.reason.value
            log.warning("%s fails: its hand-off fell short: %s", request.request_id, reason)
            self.fail_load(request.request_id, block_ids, num_external)
            return
        first, keys = tracker.num_computed, found.keys
        end = first + num_external  # vLLM may take fewer tokens than it was offered
        if end < tracker.usable(found) or self._blocks_of(keys.num_tokens) > len(block_ids[0]):
            keys = keys.prefix(end)
        tables = pool_tables(block_ids, self._blocks_of(keys.num_tokens))
        tracker.num_loading = keys.num_tokens
        tracker.num_jobs += self._num_ranks
        self._loads.append(LoadSpec(request.request_id, keys, tables, first, end, found.follow))

    def give_up(self, request_id: str) -> None:
        """Loads nothing for this request any more, because something failed for it."""
        if (tracker := self._requests.get(request_id)) is not None:
            self._break_even.load_ended(request_id, tracker.num_computed)
            tracker.lookup, tracker.num_loading = None, 0

    def fail_load(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Queues a load that loads nothing: vLLM waits until the workers report its end."""
        self.give_up(request_id)
        tables = pool_tables(block_ids, len(block_ids[0]))
        end = len(block_ids[0]) * self._block_tokens
        first = end - self._blocks_of(num_external) * self._block_tokens
        self._loads.append(LoadSpec(request_id, None, tables, first, end))

    def take_metadata(self) -> PDStoreConnectorMetadata:
        """Takes the queued loads and aborts; `add_saves` adds the saves."""
        self._patience.renew()
        metadata = PDStoreConnectorMetadata(self._loads, aborted_handoffs=self._aborted_handoffs)
        self._loads, self._aborted_handoffs = [], []
        return metadata

    def add_saves(self, metadata: PDStoreConnectorMetadata, output: Any) -> None:
        """Adds the saves of what a step computes."""
        self._note_outcomes()
        num_tokens = sum(output.num_scheduled_tokens.values())
        is_asking = self._cache is not None and self._cache.num_waiting > 0
        metadata.wait_s = self._idle_steps.wait_s(num_tokens, is_asking=is_asking)
        if not num_tokens:
            return
        steps = [
            (self._requests[name], num_scheduled)
            for name, num_scheduled in output.num_scheduled_tokens.items()
            if name in self._requests
        ]
        self._steps.scheduled((tracker.request, num) for tracker, num in steps)
        if self._saves is not None:
            self._saves.step(output)
        for tracker, num_scheduled in steps:
            tracker.scheduled(num_scheduled)
            self._add_save(metadata, tracker, num_scheduled)

    def report(self, report: StepReport | None, loaded: Iterable[str]) -> None:
        """Takes up the outcome of a step: releases saved blocks and remembers failed loads.

        loaded: requests whose load has ended, also those that failed.
        """
        if report is not None and self._cache is not None:
            for request_id, (num_tokens, seconds) in report.loaded.items():
                self._break_even.worked(request_id, seconds)
                self._cache.note_load(num_tokens, seconds)
            for request_id in report.failed:
                self.give_up(request_id)
            if self._refs is not None:
                self._refs.release(report.released)
            self._records.take(report.ended, self._requests)
            saves = [job.reason for job in report.ended if job.direction is Direction.SAVE]
            self._cache.note_saves(saves)
        for request_id in loaded:
            if (tracker := self._requests.get(request_id)) and tracker.num_loading:
                self._break_even.load_ended(request_id, tracker.num_loading)
                tracker.end_load(self._metrics)

    def finish(self, request: Any) -> dict[str, Json] | None:
        """Forgets a request that has ended. Returns the `kv_transfer_params` of P's answer."""
        self._note_outcomes()
        self._steps.forget(request.request_id)
        self._break_even.forget(request.request_id)
        if self._saves is not None:
            self._saves.forget(request.request_id)
        if (tracker := self._requests.pop(request.request_id, None)) is None:
            return None
        if tracker.lookup is not None:
            tracker.lookup.cancel()
        self._records.finish(tracker)
        if tracker.handoff is not None and not tracker.is_announced:
            self._aborted_handoffs.append(tracker.handoff)
            return None
        return {**tracker.answer, **tracker.told(self._settings.load)} or None

    @property
    def is_at_work(self) -> bool:
        """True while vLLM must keep stepping although it has no request."""
        return bool(self._aborted_handoffs or self._refs or self._records.is_waiting)

    @property
    def holds_blocks(self) -> bool:
        """True while a save holds blocks, which come back without a preemption."""
        return bool(self._refs)

    def reset(self) -> bool:
        """Clears this namespace in the pool; False if that failed."""
        return self._cache is None or self._cache.clear()

    def close(self) -> None:
        self._records.close()
        for each in (self._cache, self._reporting):
            if each is not None:
                each.close()

    def _add_save(
        self, metadata: PDStoreConnectorMetadata, tracker: RequestTracker, num_scheduled: int
    ) -> None:
        save = self._saves.plan(tracker, num_scheduled) if self._saves is not None else None
        if save is None:
            return
        tracker.num_jobs += self._num_ranks
        metadata.saves.append(save)
        if tracker.handoff is not None and tracker.is_concurrent:
            tracker.is_concurrent = False
            metadata.started_handoffs.append((tracker.handoff, tracker.keys.num_tokens))

    def _note_outcomes(self) -> None:
        for outcome in self._steps.take_outcomes():
            if (tracker := self._requests.get(str(outcome.name))) is not None:
                tracker.outcome = outcome

    def _plan_saves(self) -> None:
        """Makes the planner once both the layout and vLLM's pool are known."""
        if self._refs is not None and self._block_tokens:
            self._saves = SavePlanner(self._settings, self._refs, self._block_tokens)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
