"""PDStoreConnector: passes vLLM's hooks (KVConnectorBase_V1) to its scheduler or worker side."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from pdstore.adapters.vllm import describe, stats
from pdstore.adapters.vllm.contents import Contents
from pdstore.adapters.vllm.events import PoolEvents
from pdstore.adapters.vllm.layers import report_computed
from pdstore.adapters.vllm.messages import PDStoreConnectorMetadata, RankLayout
from pdstore.adapters.vllm.plugin import (
    log_where_vllm_logs,
    refuse_other_policy,
    warn_if_plugin_is_off,
)
from pdstore.adapters.vllm.scheduler import PDStoreConnectorScheduler
from pdstore.adapters.vllm.worker import PDStoreConnectorWorker
from pdstore.errors import IllegalCall, Reason

log = logging.getLogger("vllm.pdstore")

P = ParamSpec("P")
R = TypeVar("R")


def degrades(instead: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a hook of the connector. If the hook raises, the caller gets `instead()`.

    The exception is logged and counts as a miss. If it reached vLLM, it would end the engine.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:  # none may reach the engine
                connector: Any = args[0]
                connector.count_fault(hook.__name__)
                return cast("R", instead())

        return guarded

    return decorate


class PDStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Hands KV over from prefill to decode instances through a pool.

    vLLM makes one connector in its scheduler and one in each worker. Loads are asynchronous. A save
    holds references to its blocks, so that no step waits for a save.
    Raises ConfigError from the constructor and from `register_kv_caches` for a configuration that
    pdstore does not support.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_where_vllm_logs()
        describe.refuse_unsupported(vllm_config, kv_cache_config)
        settings = describe.settings_of(vllm_config)
        self.metrics = stats.StepMetrics()
        self._shows_status = settings.status_port is not None
        self._handled: BaseException | None = None  # vLLM handled it as the step began
        self._scheduler: PDStoreConnectorScheduler | None = None
        self._worker: PDStoreConnectorWorker | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            warn_if_plugin_is_off()
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            refuse_other_policy(settings, policy)
            fails = policy == "fail"
            if fails:
                log.warning("kv_load_failure_policy is fail: a lost block fails its request")
            parallel = vllm_config.parallel_config
            self._scheduler = PDStoreConnectorScheduler(
                settings,
                parallel.world_size,
                self.metrics,
                may_follow=not fails,
                number=getattr(parallel, "data_parallel_index", 0),
                contents=Contents(
                    hashes_items=describe.hashes_items(vllm_config),
                    tells_paths_apart=describe.tells_paths_apart(),
                ),
                weights_of=partial(describe.revision_of, vllm_config=vllm_config),
                longest_prompt=vllm_config.model_config.max_model_len,
                longest_drafted=describe.longest_drafted(vllm_config),
                events=PoolEvents(
                    parallel.world_size, is_on=describe.publishes_events(vllm_config)
                ),
            )
        else:
            self._worker = PDStoreConnectorWorker(
                settings, vllm_config, kv_cache_config, self.metrics
            )

    def count_fault(self, hook: str) -> None:
        """Logs the exception that is being handled, and counts a miss."""
        error = sys.exc_info()[1]
        if isinstance(error, IllegalCall):
            self.scheduler.bypass(error)
            return
        log.exception("pdstore failed in %s; the engine continues", hook)
        self.metrics.miss(Reason.FAULT)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save can read the blocks of a preempted request, because it references them."""
        return False

    @property
    def _step(self) -> PDStoreConnectorMetadata:
        """The metadata of the current step; empty between steps."""
        bound = self._connector_metadata
        return bound if isinstance(bound, PDStoreConnectorMetadata) else PDStoreConnectorMetadata()

    # Scheduler side.

    @property
    def scheduler(self) -> PDStoreConnectorScheduler:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        self.scheduler.set_layouts([m for m in metadata.values() if isinstance(m, RankLayout)])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.saves.block_pool = gpu_block_pool

    @degrades(lambda: None)
    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrive(request)

    @degrades(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self.scheduler.num_found(request, num_computed_tokens)
        return found, bool(found)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns the KV groups whose new blocks vLLM need not clear, as loads fill them: none.

        vLLM clears blocks only for models with states and for KV of several types, because bytes
        of one kind may be no numbers when they are read as another. A load writes only a prompt's
        tokens into its last block. It waits for the clearing (`loads_need_no_event` is False).
        """
        return ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0 and not self._load(request, blocks, num_external_tokens):
            ids = blocks.get_block_ids()
            self.scheduler.fail_load(request.request_id, ids, num_external_tokens)
        self._tell_found(request)

    @degrades(lambda: None)
    def _tell_found(self, request: Any) -> None:
        self.scheduler.tell_found(request)

    @degrades(lambda: False)
    def _load(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        self.scheduler.load(request, blocks.get_block_ids(), num_external_tokens)
        return True

    def build_connector_meta(self, scheduler_output: Any) -> PDStoreConnectorMetadata:
        metadata = PDStoreConnectorMetadata()
        self.scheduler.add_loads(metadata)
        try:
            self.scheduler.add_saves(metadata, scheduler_output)
        except Exception:  # it must stop only the saves: vLLM waits for the loads
            self.count_fault("build_connector_meta")
        return metadata

    @degrades(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if report is not None:
            self.scheduler.report(report)
        given = getattr(connector_output, "kv_connector_stats", None)
        new = stats.stats_of(given, type(self).__name__)
        if new is not None and self._shows_status:
            self.scheduler.worker_metrics.observe(new.data)

    @degrades(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @degrades(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finish_request(request, block_ids)

    @degrades(list)
    def take_events(self) -> Sequence[Any]:
        return self.scheduler.events.take()

    @degrades(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self.scheduler.is_at_work

    @degrades(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return bool(self.scheduler.saves)

    @degrades(lambda: False)
    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    # Worker side.

    @property
    def worker(self) -> PDStoreConnectorWorker:
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)
        report_computed(self._vllm_config, kv_caches, self.save_kv_layer)

    def get_handshake_metadata(self) -> RankLayout | None:
        return self.worker.handshake()  # vLLM calls this at the end of its start

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._finish_previous_step()
        super().bind_connector_metadata(connector_metadata)
        self._notice_writes()
        self._begin_step()
        self._handled = sys.exc_info()[1]

    @degrades(lambda: None)
    def _finish_previous_step(self) -> None:
        """Saves the KV of the last step, if vLLM's runner has not ended that step.

        With speculative decoding, vLLM ends a step only on the last pipeline stage.
        """
        self.worker.begin_loads()
        self.worker.open_saves.end_step()

    @degrades(lambda: None)
    def _notice_writes(self) -> None:
        self.worker.notice_writes(self._step)

    @degrades(lambda: None)
    def _begin_step(self) -> None:
        try:
            self.worker.start_loads(self._step)
        finally:
            self.worker.start_saves(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: vLLM may call it only when the forward pass has been launched.

        That is too late for saves that copy layers meanwhile, so a step begins when its metadata
        is bound.
        """

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are asynchronous."""

    @degrades(lambda: None)
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any = None, attn_metadata: Any = None, **kwargs: Any
    ) -> None:
        self.worker.open_saves.layer_done(layer_name)

    @degrades(lambda: None)
    def wait_for_save(self) -> None:
        # vLLM's runner calls this in a `finally`, even if the forward pass raised an exception
        if sys.exc_info()[1] is self._handled:
            self.worker.open_saves.end_step()
        else:
            self.worker.open_saves.cancel_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._end_loads(finished_req_ids)[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        loaded, failed = self._end_loads(finished_req_ids)
        if not self.worker.fails_whole:
            failed = set()  # vLLM computes the tokens behind the loaded blocks
        return base.KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    @degrades(lambda: (set(), set()))
    def _end_loads(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.worker.begin_loads()
        return self.worker.end_loads(finished_req_ids)

    @degrades(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.pop_bad_blocks()

    @degrades(lambda: None)
    def build_connector_worker_meta(self) -> Any:
        return self.worker.pop_report()

    # Both sides and the API server.

    @degrades(lambda: None)
    def get_kv_connector_stats(self) -> Any:
        return self.metrics.pop()

    @degrades(lambda: None)
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    @classmethod
    def supports_sleep_mode(cls, *_: Any) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Returns the stats for vLLM's log line, which shows no gauges and is left out if empty."""
        changes = {key: change for key, change in (data or {}).items() if key != stats.GAUGES}
        return stats.PDStoreStats(data=changes)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return stats.PDStorePromMetrics(*args)
