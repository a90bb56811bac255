"""The negative control of drafts, as a worker of vLLM's CPU backend: `--worker-cls`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from pdstore.adapters.vllm.worker import PDStoreConnectorWorker

DRAFT_LAYER = "layers.1."  # the models of tests.support.vllm_draft have one layer before it


class ColdDraftsWorker(CPUWorker):
    """Loads the draft model's KV to memory that no model reads; the target's as always."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        register = PDStoreConnectorWorker.register

        def without_drafts(
            self: PDStoreConnectorWorker, kv_caches: Mapping[str, torch.Tensor]
        ) -> None:
            drafts = [name for name in kv_caches if DRAFT_LAYER in name]
            assert len(drafts) == 1, list(kv_caches)
            aside = {name: torch.clone(kv_caches[name]) for name in drafts}
            register(self, dict(kv_caches) | aside)

        PDStoreConnectorWorker.register = without_drafts  # type: ignore[method-assign]
