"""PDStoreConnectorWorker: the connector's worker side, one for each rank, on KVPool."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pdstore.adapters.vllm.degrades import kept_to_itself
from pdstore.adapters.vllm.describe import (
    layers_by_step,
    layout_of,
    revision_of,
)
from pdstore.adapters.vllm.ended_jobs import EndedJobs
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    RankLayout,
    SaveSpec,
    StepReport,
)
from pdstore.adapters.vllm.running_loads import RunningLoads
from pdstore.adapters.vllm.step_saves import StepSaves
from pdstore.format.handoff import HandoffId
from pdstore.format.layout import NO_BLOCK, BlockTables
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.self_test import self_test
from pdstore.settings import Settings
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

log = logging.getLogger("vllm.pdstore")


class PDStoreConnectorWorker:
    """Runs the loads and saves of each step's metadata, and reports their outcome.

    vLLM's worker thread calls it. Every load is reported, whatever happens: vLLM waits for it
    without a bound.

    loads: those that run, and their outcomes.
    """

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._metrics = metrics
        self._pool: KVPool | None = None
        self._rows_per_block = 1
        self._rank_layout: RankLayout | None = None
        self._step_saves = StepSaves()
        self._opened: PDStoreConnectorMetadata | None = None  # whose saves are open
        self.loads = RunningLoads(metrics)
        self._saves: dict[int, tuple[SaveSpec, Job]] = {}
        self._saves_of: defaultdict[str, list[Job]] = defaultdict(list)  # by request
        self._reported: set[int] = set()  # saves that are released and still run
        self._ended = EndedJobs()
        self._released: Counter[int] = Counter()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the pool on vLLM's allocated KV cache; its memory is pinned by the end of `ready`.

        vLLM captures graphs right after this hook: then the end of pinning is waited for here.
        Raises PDStoreError if the cache does not fit.
        """
        layout, caches = layout_of(
            self._settings, self._vllm_config, self._kv_cache_config, kv_caches
        )
        weights = revision_of(self._settings, self._vllm_config)
        namespace = layout.namespace(self._settings, weights=weights)
        tensors = list(caches.values())
        if self._settings.selftest:
            self_test(self._settings, layout, tensors)
        pool = KVPool(self._settings, layout, tensors, namespace, metrics=self._metrics)
        rows_per_block = tensors[0].shape[0] // self._kv_cache_config.num_blocks
        layers = layers_by_step(self._vllm_config, layout, list(caches))
        drafts = getattr(self._vllm_config, "speculative_config", None) is not None
        self.begin(pool, rows_per_block, layers, ends_late=drafts)
        if not self._vllm_config.model_config.enforce_eager:
            pool.ready()

    def begin(
        self,
        pool: KVPool,
        rows_per_block: int = 1,
        layers: Sequence[str] = (),
        *,
        ends_late: bool = False,
    ) -> None:
        """Begins to load and save with a pool, which `close` closes.

        rows_per_block: rows of the cache tensors that one block of vLLM's tables takes.
        layers: names of the first layers of the pool's layout, in order; see `StepSaves`.
        ends_late: vLLM ends a step only when it has drafted tokens.
        """
        self._pool = pool
        self._rows_per_block = rows_per_block
        block_tokens = rows_per_block * pool.layout.engine_block_tokens
        self._rank_layout = RankLayout(pool.namespace, block_tokens, self)
        self.loads = RunningLoads(self._metrics, block_tokens, fails_whole=self.fails_whole)
        self._step_saves = StepSaves(pool.layout, layers, ends_late=ends_late)

    def ready(self) -> None:
        """Waits until the pool's memory is pinned. Raises SwapError or TimeoutError."""
        if self._pool is not None:
            self._pool.ready()

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "the KV cache is registered before the first step"
        return self._pool

    @property
    def rank_layout(self) -> RankLayout | None:
        """The layout for the handshake with the scheduler side; None before `register`."""
        return self._rank_layout

    @property
    def fails_whole(self) -> bool:
        """True if a load that brings less than was promised counts as having brought nothing.

        vLLM goes on from the first block that it is told is bad. It cannot be told of one that a
        window has given back, nor of any where several groups number their blocks.
        """
        has_windows = self._rank_layout is not None and self._rank_layout.namespace.windows
        return len(self._kv_cache_config.kv_cache_groups) > 1 or bool(has_windows)

    def start_loads(self, metadata: PDStoreConnectorMetadata) -> None:
        """Starts the loads of a step; marks aborted hand-offs. Called in every step."""
        for handoff in metadata.aborted_handoffs:
            self.pool.abort_handoff(handoff)
        for spec in metadata.loads:  # all of them are reported, even if starting one fails
            self.loads.put(spec, None)
            with kept_to_itself(spec.request_id):
                self._start_load(spec)

    def layer_done(self, metadata: PDStoreConnectorMetadata, name: str) -> None:
        """Begins to save a layer range of a step, behind what is queued on the current stream."""
        num_layers = self._step_saves.layer_done(name)
        if num_layers:
            self._open_saves(metadata)
            self._step_saves.release(num_layers)

    def finish_saves(self, metadata: PDStoreConnectorMetadata) -> None:
        """Saves what is left of a step, behind what is queued on the current stream."""
        try:
            self._open_saves(metadata)
        finally:
            self._opened = None
            self._step_saves.finish()

    def cancel_saves(self, metadata: PDStoreConnectorMetadata) -> None:
        """Cancels the saves of a step that failed: not all of its layers are computed."""
        try:
            self._open_saves(metadata)  # their ends tell D, and release their blocks
        finally:
            self._opened = None
            self._step_saves.cancel()

    def take_loaded(self, finished: set[str], wait_s: float = 0.0) -> set[str]:
        """Returns the requests whose load has ended since the last call, well or not.

        finished: requests that have ended; their loads are cancelled.
        wait_s: time to wait for the end of a load or a save, if all that are known still run.
        """
        if wait_s and not finished:
            self._wait_for_end(wait_s)
        return self.loads.take(finished)

    def take_complete(self, wait_s: float = 0.0) -> set[str]:
        """Returns the requests whose load has brought all; `wait_s` as in `take_loaded`."""
        if wait_s:
            self._wait_for_end(wait_s)
        return self.loads.take_complete()

    @property
    def is_idle(self) -> bool:
        """True if no load and no save is running or still to be reported."""
        return not (len(self.loads) or self._saves or self._saves_of or self._reported)

    def take_report(self) -> StepReport | None:
        """Returns what has ended since the last report, for the scheduler side; None if nothing.

        A near worker makes a report as long as jobs run: vLLM does not show an empty output.
        """
        for number, (spec, job) in list(self._saves.items()):
            is_read = job.done if spec.handoff else job.captured
            if is_read and number not in self._reported:
                self._reported.add(number)
                self._released[number] = 1
            if job.done:
                self._reported.discard(number)
                del self._saves[number]
                self._forget(spec.request_id, job)
        is_shown = self.loads.is_near and bool(len(self.loads) or self._saves)
        report = StepReport(self._released, *self.loads.take_outcomes(), self._ended.take())
        self._released = Counter()
        is_empty = not (report.released or report.failed or report.loaded or report.ended)
        return None if is_empty and not is_shown else report

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _start_load(self, spec: LoadSpec) -> None:
        if spec.keys is None:
            return
        rows = self._rows(spec.tables)
        job = self.pool.load(spec.keys, rows, first_token=spec.first_token, follow=spec.follow)
        self.loads.put(spec, job)
        self._ended.watch(spec.request_id, job)

    def _open_saves(self, metadata: PDStoreConnectorMetadata) -> None:
        """Starts the saves of a step, at the first call for it."""
        if metadata is self._opened:
            return
        self._opened = metadata
        for spec in metadata.saves:  # released at once if they cannot be started
            self._released[spec.number] = 1
        starts = metadata.started_handoffs
        for spec in metadata.saves:
            with kept_to_itself(spec.request_id):
                self._open_save(spec, starts)
                starts = []  # the first save of the step tells of all
            if spec.number in self._released:
                self._metrics.miss(Reason.FAULT)
                if spec.handoff is not None:
                    self.pool.abort_handoff(spec.handoff)

    def _open_save(self, spec: SaveSpec, starts: Sequence[tuple[HandoffId, int]]) -> None:
        save = self.pool.begin_save(
            spec.keys,
            self._rows(spec.tables),
            first_token=spec.first_token,
            handoff=spec.handoff,
            after=self._saves_of.get(spec.request_id, ()),
            starts=starts,
        )
        del self._released[spec.number]
        self._step_saves.add(save)
        self._saves[spec.number] = (spec, save.job)
        self._ended.watch(spec.request_id, save.job, spec.number)
        self._saves_of[spec.request_id].append(save.job)

    def _wait_for_end(self, timeout_s: float) -> None:
        jobs = [*self.loads.jobs, *(job for _, job in self._saves.values())]
        if jobs and not any(job is None or job.done for job in jobs):
            self._ended.wait(timeout_s)

    def _forget(self, request_id: str, job: Job) -> None:
        self._saves_of[request_id].remove(job)
        if not self._saves_of[request_id]:
            del self._saves_of[request_id]

    def _rows(self, tables: BlockTables) -> BlockTables:
        """Rows of the cache tensors; one of vLLM's blocks may be several of the kernel's."""
        n = self._rows_per_block
        if n == 1:
            return tables
        return [
            [NO_BLOCK if id == NO_BLOCK else id * n + i for id in table for i in range(n)]
            for table in tables
        ]
