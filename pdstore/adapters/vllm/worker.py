"""PDStoreConnectorWorker: the connector's worker side on each rank; it uses KVPool."""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from pdstore.adapters.vllm.describe import layers_by_step, layout_of, revision_of
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    SaveSpec,
    StepReport,
)
from pdstore.adapters.vllm.tables import StateTables, Tables
from pdstore.adapters.vllm.weights import WeightsWatch
from pdstore.engine.job_end import JobEnd
from pdstore.engine.self_test import self_test
from pdstore.errors import Direction, Reason
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.threads import call_or
from pdstore.worker.job import Job
from pdstore.worker.open_save import OpenSave
from pdstore.worker.pool import KVPool
from pdstore.worker.swap.base import READY_NOW, ReadyEvent

log = logging.getLogger("vllm.pdstore")

Spec = TypeVar("Spec", LoadSpec, SaveSpec)

_LONGEST_WAIT_S = 0.1
"""So long at most a load that has ended waits for others: about as long as a step takes."""


@dataclass
class _Running(Generic[Spec]):
    """A load or a save from its start until its end is reported.

    job: None if the job could not begin, or if there is nothing to load.
    end: any thread sets it when the job ends.
    company: the loads that began with it, and like it leave a prefill to vLLM.
    began, ended: in seconds of the monotonic clock; `ended` is set before `end`.
    """

    spec: Spec
    job: Job | None = None
    end: JobEnd | None = None
    is_released: bool = False
    company: Sequence[_Running[LoadSpec]] = ()
    began: float = 0.0
    ended: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.job is None or self.end is not None

    @property
    def waits_for_company(self) -> bool:
        """True while it is better to report this load, which is over, together with others.

        vLLM then computes the rest of their prompts in one step instead of several. A load waits at
        most as long again as it took.
        """
        if all(each.is_over for each in self.company):
            return False
        longest = min(self.ended - self.began, _LONGEST_WAIT_S)
        return time.monotonic() < self.ended + longest

    def job_ended(self, job: Job) -> None:
        """Keeps the job's end for the next report."""
        self.ended = time.monotonic()
        self.end = JobEnd.of_job(job, self.spec.request_id, self.spec.number)


@dataclass(eq=False)
class PDStoreConnectorWorker:
    """Runs the loads and saves that each step's metadata lists, and reports their outcome.

    vLLM's worker thread calls it. Every load is reported, whatever happens, because vLLM waits for
    the report without a timeout.

    open_saves: the saves of the current step that still wait for layers to be computed.
    loads_need_no_event: True if no work of the GPU uses the blocks that vLLM gives to a load: no
      event has to fire before the load writes them. Where steps overlap, vLLM frees the blocks of
      an ended request only after all steps in flight (its scheduler's `defer_block_free`). But it
      does so only in a KV consumer, and not for blocks that a sliding window gives back. Blocks
      that a step clears for a load are in use too.
    """

    settings: Settings
    vllm_config: Any
    kv_cache_config: Any
    metrics: Metrics

    def __post_init__(self) -> None:
        self.open_saves = OpenSaves()
        self.loads_need_no_event = False
        self._pool: KVPool | None = None
        self._rank_layout: RankLayout | None = None
        self._rows_per_block = 1
        # loads that have not begun, and the event after which their blocks may be written
        self._queued: list[tuple[LoadSpec, ReadyEvent | None]] = []
        self._loads: dict[str, _Running[LoadSpec]] = {}  # by request
        self._saves: dict[int, _Running[SaveSpec]] = {}  # by number
        self._bad_blocks: set[int] = set()
        self._report = StepReport()
        self._weights = WeightsWatch([])
        self._rank = getattr(getattr(self.vllm_config, "parallel_config", None), "rank", 0)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the pool on the KV cache that vLLM has allocated.

        The pool then pins its host memory in the background. `handshake` waits until that is done.
        But if vLLM will capture CUDA graphs right after this hook, the hook itself waits. Raises
        PDStoreError if pdstore does not support the cache.
        """
        config = self.vllm_config
        self._weights = call_or(partial(WeightsWatch.of_caller, config), self._weights)
        layout, caches = layout_of(self.settings, config, self.kv_cache_config, kv_caches)
        namespace = layout.namespace(self.settings, weights=revision_of(self.settings, config))
        tensors = list(caches.values())
        if self.settings.selftest:
            self_test(self.settings, layout, tensors)
        pool = KVPool(self.settings, layout, tensors, namespace, metrics=self.metrics)
        rows_per_block = max(each.shape[0] for each in tensors) // self.kv_cache_config.num_blocks
        layers = layers_by_step(config, layout, list(caches))
        drafts = getattr(config, "speculative_config", None) is not None
        self.use_pool(pool, rows_per_block, layers, ends_late=drafts)
        if not config.model_config.enforce_eager:
            pool.ready()

    def use_pool(
        self,
        pool: KVPool,
        rows_per_block: int = 1,
        layers: Sequence[str] = (),
        *,
        ends_late: bool = False,
    ) -> None:
        """Makes all loads and saves use `pool` from now on; `close` closes the pool.

        rows_per_block: rows of the cache tensors that one block of vLLM's tables fills; a state
          always fills one.
        layers, ends_late: as `OpenSaves` takes them.
        """
        self._pool = pool
        self._rows_per_block = rows_per_block
        block_tokens = rows_per_block * pool.layout.geometry.common_tokens
        states = StateTables.of(self.kv_cache_config)
        self._rank_layout = RankLayout(pool.namespace, block_tokens, states)
        config = self.vllm_config
        overlaps = config.max_concurrent_batches > 1  # vLLM takes 10 ms to find this out
        is_safe = not overlaps or config.kv_transfer_config.is_kv_consumer
        is_cleared = getattr(self.kv_cache_config, "needs_kv_cache_zeroing", False)
        needs_all = pool.namespace.continuation.needs_all
        self.loads_need_no_event = is_safe and needs_all and not is_cleared
        self.open_saves = OpenSaves(pool.layout, layers, ends_late=ends_late)

    def handshake(self) -> RankLayout | None:
        """Waits until the pool's memory is pinned. Returns the layout for the scheduler side.

        Returns None before `register`. Raises SwapError or TimeoutError.
        """
        if self._pool is not None:
            self._pool.ready()
        return self._rank_layout

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "the KV cache is registered before the first step"
        return self._pool

    @property
    def fails_whole(self) -> bool:
        """True if a load that brings less than promised must count as one that brings nothing.

        Otherwise vLLM is told which blocks are bad, and computes all tokens from the first bad
        block on. vLLM cannot be told of a block that a sliding window has given back; with several
        KV groups, it cannot be told of any block.
        """
        has_gaps = self._pool is not None and not self._pool.namespace.continuation.needs_all
        return has_gaps or len(self.kv_cache_config.kv_cache_groups) > 1

    @property
    def is_idle(self) -> bool:
        """True if no load and no save is running or still to be reported."""
        return not (self._queued or self._loads or self._saves)

    def watch_weights(self, watch: WeightsWatch) -> None:
        """Makes `watch` tell whether weights were written, from now on."""
        self._weights = watch

    def notice_writes(self, metadata: PDStoreConnectorMetadata) -> None:
        """Notices if weights were written since the last step; every step calls it first.

        Loads of KV that belongs to earlier weights are cancelled, and count as failed.
        """
        moves = bool(metadata.loads or metadata.saves)
        weights = self._weights.check(metadata.step, metadata.question, counts=moves)
        if weights is None:
            return
        self._report.weights[self._rank] = weights
        for running in self._loads.values():
            if running.job is not None and not self._has_weights_of(running.spec):
                running.job.cancel()

    def start_loads(self, metadata: PDStoreConnectorMetadata) -> None:
        """Marks aborted hand-offs, and queues the loads of a step. Every step calls it.

        vLLM has queued on the GPU what clears the blocks of these loads, and not yet the forward.
        Unless `loads_need_no_event`, the loads wait for the GPU's work so far, but not for the
        forward.
        """
        ready: ReadyEvent | None = READY_NOW
        if metadata.loads and not self.loads_need_no_event:
            ready = call_or(self.pool.caller_event, None)
        self._queued += [(spec, ready) for spec in metadata.loads]
        for handoff in metadata.aborted_handoffs:
            self.pool.abort_handoff(handoff)

    def begin_loads(self) -> None:
        """Begins all queued loads, when vLLM has launched the step.

        Earlier, the threads that load would take the GIL from the thread that launches the step.
        """
        queued, self._queued = self._queued, []
        company: list[_Running[LoadSpec]] = []
        for spec, ready in queued:  # all of them are reported, even if starting one fails
            running = self._loads[spec.request_id] = _Running(spec, began=time.monotonic())
            if spec.num_left > 1:
                running.company = company
                company.append(running)
            if (plan := spec.plan) is not None and not self._has_weights_of(spec):
                running.end = JobEnd.fault(Direction.LOAD, spec.request_id, reason=Reason.NAMESPACE)
            elif plan is not None:
                with self._starting(running, Direction.LOAD):
                    tables = self._rows(spec.block_ids)
                    running.job = self.pool.begin_load(plan, tables, ready=ready)
                    running.job.on_end(running.job_ended)

    def start_saves(self, metadata: PDStoreConnectorMetadata) -> None:
        """Starts the saves of a step; `open_saves` tells them when they may read a layer."""
        for spec in metadata.saves:
            of_request = [s for s in self._saves.values() if s.spec.request_id == spec.request_id]
            earlier = [each.job for each in of_request if each.job is not None]
            running = self._saves[spec.number] = _Running(spec)
            plan = spec.plan
            if not self._has_weights_of(spec):  # the step computes KV of other weights
                running.end = JobEnd.fault(
                    Direction.SAVE, spec.request_id, spec.number, Reason.CANCELLED
                )
                if plan.handoff is not None:
                    self.pool.abort_handoff(plan.handoff)
                continue
            with self._starting(running, Direction.SAVE):
                save = self.pool.begin_save(plan, self._rows(spec.block_ids), after=earlier)
                self.open_saves.add(save)
                running.job = save.job
                running.job.on_end(running.job_ended)
            if running.job is None and plan.handoff is not None:
                self.pool.abort_handoff(plan.handoff)

    def end_loads(self, finished: Collection[str] = ()) -> tuple[set[str], set[str]]:
        """Returns the requests whose load ended since the last call, and those whose load failed.

        A load has failed if it brought fewer tokens than vLLM relies on.

        finished: requests that have ended; their loads are cancelled.
        """
        loaded, failed = set(), set()
        for request_id, running in list(self._loads.items()):
            if running.job is not None and request_id in finished:
                running.job.cancel()
            if not running.is_over or running.waits_for_company:
                continue
            del self._loads[request_id]
            loaded.add(request_id)
            if not self._end_load(running):
                failed.add(request_id)
        return loaded, failed

    def pop_bad_blocks(self) -> set[int]:
        """Returns the ids of vLLM's blocks that the loads since the last call did not fill."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def pop_report(self) -> StepReport | None:
        """Returns a report on the work since the last report; None if nothing is to be reported."""
        report, self._report = self._report, StepReport()
        for number, running in list(self._saves.items()):
            job, end = running.job, running.end
            is_read = job is not None and job.captured and running.spec.plan.handoff is None
            if (is_read or end is not None) and not running.is_released:
                running.is_released = True
                report.released[number] = 1
            if end is not None:
                report.ended.append(end)
                del self._saves[number]
        return report if report != StepReport() else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _end_load(self, running: _Running[LoadSpec]) -> bool:
        """Reports a load that has ended; returns whether it brought all that vLLM relies on."""
        plan, num_loaded = running.spec.plan, 0
        if plan is not None and running.end is not None:
            self._report.ended.append(running.end)
            num_loaded = plan.first_token
            if self._has_weights_of(running.spec):
                num_loaded = max(num_loaded, running.end.num_tokens)
            if num_loaded >= plan.num_tokens:
                return True
        if not self.fails_whole:
            block_tokens = self._rank_layout.block_tokens if self._rank_layout else 1
            [table] = running.spec.block_ids  # with several, loads fail whole
            self._bad_blocks |= {*[*table][num_loaded // block_tokens :]} - {NO_BLOCK}
        return False

    def _has_weights_of(self, spec: LoadSpec | SaveSpec) -> bool:
        """Returns whether a load or save was planned for the weights that this rank has now."""
        return spec.weights.get(self._rank, 0) == self._weights.state.generation

    @contextlib.contextmanager
    def _starting(self, running: _Running[Any], direction: Direction) -> Iterator[None]:
        """Logs and counts an exception at a job's start, so that the step's other jobs begin."""
        try:
            yield
        except Exception:
            spec = running.spec
            self.metrics.miss(Reason.FAULT)
            running.end = JobEnd.fault(direction, spec.request_id, spec.number)
            log.exception("a %s of request %s could not begin", direction.value, spec.request_id)

    def _rows(self, block_ids: Tables) -> Tables:
        """Returns the rows of the cache tensors that blocks fill, several for a block of tokens."""
        n = self._rows_per_block
        if n == 1:
            return block_ids
        each = range(n)
        return [
            table
            if isinstance(table, dict)
            else array(
                "q", [NO_BLOCK if id == NO_BLOCK else id * n + i for id in table for i in each]
            )
            for table in block_ids
        ]


@dataclass(eq=False)
class OpenSaves:
    """The saves of one step: they copy a layer range while the model computes the next range.

    When vLLM has reported all layers up to the end of a range, in any order, `OpenSave` queues a
    copy of that range. Layers that are not reported during the step are saved at its end. vLLM does
    not report layers with states or pages: they are computed when it reports a layer that stands
    behind them in the layout.

    layout: the pool's layout; None while there is no pool.
    layers: names, in order, of the cache's first layers, which may be saved during the step.
    ends_late: True if vLLM ends a step only after drafting tokens; the pool's workers then begin as
      soon as the last layer is queued.
    """

    layout: Layout | None = None
    layers: Sequence[str] = ()
    ends_late: bool = False

    def __post_init__(self) -> None:
        # where ranges end: so many layers, and those of them that vLLM reports
        self._ends: list[tuple[int, frozenset[str]]] = []
        if self.layout is not None:
            kept = [self.layout.identity.layers[number] for number in self.layout.held_layers]
            reported: list[str] = []
            num_ranges = 0
            for n, (name, spec) in enumerate(zip(self.layers, kept, strict=False), 1):
                if spec.form is not None:
                    continue
                reported.append(name)
                if (now := self.layout.num_whole_ranges(n)) > num_ranges:
                    num_ranges = now
                    self._ends.append((n, frozenset(reported)))
        self._num_ended = 0
        self._open: list[OpenSave] = []
        self._computed: set[str] = set()

    def add(self, save: OpenSave) -> None:
        """Adds a save of this step, before any of its layers is computed."""
        self._open.append(save)

    def layer_done(self, name: str) -> None:
        """Notes that a layer is queued; lets its range be saved if all layers so far are queued."""
        if not self._open:
            return
        self._computed.add(name)
        ended = self._num_ended
        while ended < len(self._ends) and self._ends[ended][1] <= self._computed:
            ended += 1
        if ended > self._num_ended:
            self._num_ended = ended
            num_layers, _ = self._ends[ended - 1]
            for save in self._open:
                save.layers_done(num_layers, will_continue=not self.ends_late)

    def end_step(self) -> None:
        """Lets the other layers be saved, and ends the step. If that fails, cancels the saves."""
        num_layers = len(self.layout.held_layers) if self.layout is not None else 0
        try:
            while self._open:
                self._open[-1].layers_done(num_layers)
                self._open.pop()
        finally:
            self.cancel_step()

    def cancel_step(self) -> None:
        """Ends the step and cancels the open saves, which may lack layers.

        At the end of a cancelled save its blocks are freed, and D is told that the hand-off failed.
        """
        for save in self._open:
            save.job.cancel()
        self._open.clear()
        self._computed.clear()
        self._num_ended = 0
