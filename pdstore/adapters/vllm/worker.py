"""PDStoreConnectorWorker: what the connector does beside one rank's model, on KVPool."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from pdstore.adapters.vllm.describe import as_seen, layout_of, revision_of
from pdstore.adapters.vllm.messages import (
    LoadSpec,
    PDStoreConnectorMetadata,
    Registered,
    SaveSpec,
    StepReport,
)
from pdstore.format.layout import NO_BLOCK, BlockTables
from pdstore.metrics import Metrics
from pdstore.outcome import Reason
from pdstore.settings import Settings
from pdstore.worker.job import Job
from pdstore.worker.pool import KVPool

log = logging.getLogger("vllm.pdstore")


class PDStoreConnectorWorker:
    """Loads and saves what the scheduler's half orders, and reports. vLLM's worker thread calls it.

    A load is reported in every case: vLLM waits for it without a bound.
    """

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._metrics = metrics
        self._pool: KVPool | None = None
        self._rows_per_block = 1
        self._registered: Registered | None = None
        self._loads: dict[str, tuple[LoadSpec, Job | None]] = {}
        self._saves: dict[int, tuple[SaveSpec, Job]] = {}
        self._of_request: defaultdict[str, list[Job]] = defaultdict(list)
        self._told: set[int] = set()  # saves that are released and not done
        self._released: Counter[int] = Counter()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The KV cache is allocated. Raises PDStoreError, with the reason, if it does not fit."""
        caches = as_seen(self._kv_cache_config, kv_caches)
        layout = layout_of(self._settings, self._vllm_config, self._kv_cache_config, caches)
        weights = revision_of(self._settings, self._vllm_config)
        namespace = layout.namespace(self._settings, weights=weights)
        tensors = list(caches.values())
        self._pool = KVPool(self._settings, layout, tensors, namespace, metrics=self._metrics)
        self._rows_per_block = tensors[0].shape[0] // self._kv_cache_config.num_blocks
        block_tokens = self._rows_per_block * layout.engine_block_tokens
        self._registered = Registered(namespace, block_tokens)

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "orders come after the KV cache is registered"
        return self._pool

    @property
    def registered(self) -> Registered | None:
        return self._registered

    @property
    def fails_whole(self) -> bool:
        """A load that brought less than was promised brought nothing.

        vLLM goes on from the first bad block where it can, but it has given back what the windows
        before that block would need.
        """
        has_windows = self._registered is not None and self._registered.namespace.windows
        return len(self._kv_cache_config.kv_cache_groups) > 1 or bool(has_windows)

    def start_loads(self, orders: PDStoreConnectorMetadata) -> None:
        """Starts loads and aborts hand-offs: called in every step, unlike `start_saves`."""
        for order in orders.loads:  # known, whatever happens next
            self._loads[order.request_id] = (order, None)
        for order in orders.loads:
            if order.keys is None:
                continue
            rows = self._rows(order.tables)
            job = self.pool.load(order.keys, rows, first_token=order.first_token)
            self._loads[order.request_id] = (order, job)
        for attempt in orders.aborted_handoffs:
            self.pool.abort_handoff(attempt)

    def start_saves(self, orders: PDStoreConnectorMetadata) -> None:
        for order in orders.saves:  # if they cannot even be started
            self._released[order.number] = 1
        for order in orders.saves:
            job = self.pool.save(
                order.keys,
                self._rows(order.tables),
                first_token=order.first_token,
                handoff=order.attempt,
                after=self._of_request[order.request_id],
            )
            del self._released[order.number]
            self._saves[order.number] = (order, job)
            self._of_request[order.request_id].append(job)

    def take_loaded(self, finished: set[str]) -> set[str]:
        """Requests whose load has ended since the last call, well or not.

        finished: requests that have ended: nobody waits for their loads.
        """
        ended = set()
        for request_id, (order, job) in list(self._loads.items()):
            if job is not None and request_id in finished:
                job.cancel()
            if job is not None and not job.done:
                continue
            del self._loads[request_id]
            ended.add(request_id)
            self._note_failure(order, job)
        return ended

    @property
    def bad_blocks(self) -> set[int]:
        """vLLM's blocks of the loads just taken that do not hold what they should."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    @property
    def failed(self) -> set[str]:
        """The loads just taken that brought less than was promised."""
        return set(self._failed)

    def take_report(self) -> StepReport | None:
        """What the scheduler's half must hear after this step; None: nothing."""
        for number, (order, job) in list(self._saves.items()):
            is_read = job.done if order.attempt else job.captured
            if is_read and number not in self._told:
                self._told.add(number)
                self._released[number] = 1
            if job.done:
                self._told.discard(number)
                del self._saves[number]
                self._forget(order.request_id, job)
        if not self._released and not self._failed:
            return None
        report = StepReport(self._released, self._failed)
        self._released, self._failed = Counter(), set()
        return report

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _note_failure(self, order: LoadSpec, job: Job | None) -> None:
        result = job.result if job is not None else None
        loaded = max(order.first_token, result.num_tokens) if result else order.first_token
        if order.keys is not None and loaded >= order.num_tokens:
            return
        self._failed.add(order.request_id)
        if result is None:
            self._metrics.miss(Reason.FAULT)
        if not self.fails_whole and self._registered is not None:
            first = loaded // self._registered.block_tokens
            self._bad_blocks |= {id for id in order.tables[0][first:] if id != NO_BLOCK}

    def _forget(self, request_id: str, job: Job) -> None:
        self._of_request[request_id].remove(job)
        if not self._of_request[request_id]:
            del self._of_request[request_id]

    def _rows(self, tables: BlockTables) -> BlockTables:
        """Rows of the cache tensors: a block of vLLM's tables may be several of its kernels'."""
        n = self._rows_per_block
        if n == 1:
            return tables
        return [
            [NO_BLOCK if id == NO_BLOCK else id * n + i for id in table for i in range(n)]
            for table in tables
        ]
