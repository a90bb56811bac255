"""The negative control of models with states, as a worker of vLLM's CPU backend: `--worker-cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.vllm_replay import load_without_states


class StatelessWorker(CPUWorker):
    """Loads a prompt's token rows to its blocks, and its states to blocks of no request."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        load_without_states()
