"""Engines: what the instances of a campaign run, and how to tell that one of them is idle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT, TINY

_NUM_BLOCKS = 192
_PDSTORE_IDLE = {
    "pdstore_jobs_alive": 0.0,
    "pdstore_hung_store_calls": 0.0,
    "pdstore_slots_lent": 0.0,
}


class Engine(ABC):
    """An engine that serves completions over HTTP.

    head_dim: the smallest that it computes.
    block_tokens: of the blocks in the pool.
    faults_per_s: few enough that it has time to answer.
    most_threads: how many one of its processes may start after its first requests.
    idle: metrics, and their values in an instance that does nothing.
    tells_by_steps: True if its metrics are those of its last step.
    tolerance: how far apart the logprobs of one answer may be, alone and in a batch.
    """

    name: ClassVar[str]
    head_dim: ClassVar[int]
    block_tokens: ClassVar[int]
    faults_per_s: ClassVar[float]
    most_threads: ClassVar[int] = 0
    tells_by_steps: ClassVar[bool] = False
    tolerance: float = 1e-3
    idle: ClassVar[Mapping[str, float]]

    @abstractmethod
    def command(self, model: Path, port: int, role: str, store: str) -> Sequence[str]:
        """Returns an instance's command line; an empty role and store leave the pool off."""

    def env(self, role: str, store: str) -> Mapping[str, str]:
        """Returns what an instance needs in its environment."""
        return {}

    @property
    def options(self) -> str:
        """What the campaign's log says of the engine's command line, with a space behind it."""
        return ""

    @abstractmethod
    def num_loaded(self, usage: Mapping[str, Any]) -> int:
        """Returns the prompt tokens that came from the pool, as an answer's `usage` tells them."""


class MiniEngine(Engine):
    """The mini engine.

    arguments: added to its command line.
    """

    name = "mini"
    head_dim = 16
    block_tokens = 16
    faults_per_s = 20.0
    idle: ClassVar[Mapping[str, float]] = {
        "mini_engine_free_blocks": float(_NUM_BLOCKS),
        "mini_engine_requests": 0.0,
        "mini_engine_states": 0.0,
        **_PDSTORE_IDLE,
    }

    def __init__(self, *arguments: str, tolerance: float = Engine.tolerance) -> None:
        self._arguments = arguments
        self.tolerance = tolerance

    def command(self, model: Path, port: int, role: str, store: str) -> Sequence[str]:
        return [
            *("-m", "examples.mini_engine", "--model", str(model), "--port", str(port)),
            *("--num-blocks", str(_NUM_BLOCKS), "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "64", "--served-model-name", "chaos"),
            *(("--role", role, "--store", store) if role else ()),
            *self._arguments,
        ]

    @property
    def options(self) -> str:
        return "".join(f"{argument} " for argument in self._arguments)

    def num_loaded(self, usage: Mapping[str, Any]) -> int:
        return int(usage["pdstore"]["loaded_tokens"])


class VllmEngine(Engine):
    """`vllm serve` on a CPU, without its own prefix cache: what is cached came from the pool."""

    name = "vllm"
    head_dim = 32
    block_tokens = 64
    faults_per_s = 4.0
    most_threads = 16
    tells_by_steps = True
    idle: ClassVar[Mapping[str, float]] = {
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.0,
        **_PDSTORE_IDLE,
    }

    def command(self, model: Path, port: int, role: str, store: str) -> Sequence[str]:
        return [
            *("-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"),
            *("--port", str(port), *TINY, "--max-model-len=512", "--served-model-name", "chaos"),
            "--enable-prompt-tokens-details",
        ]

    def env(self, role: str, store: str) -> Mapping[str, str]:
        common = {**ENVIRONMENT, **CPU_ENVIRONMENT}
        if not role:
            return {**common, "PD_TRANSFER_VIA_STORAGE": "0"}
        return {**common, "PDSTORE_ROLE": role, "PDSTORE_STORE": store}

    def num_loaded(self, usage: Mapping[str, Any]) -> int:
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


MINI, STATES = MiniEngine(), MiniEngine("--state")
INT8 = MiniEngine("--kv-cache-dtype", "int8", tolerance=1e-2)  # a last digit decides a rounding
ENGINES: dict[str, Sequence[Engine]] = {
    "mini": (MINI, STATES, INT8),
    "states": (STATES,),
    "int8": (INT8,),
    "vllm": (VllmEngine(),),
}
"""The engines that a campaign draws from for each stage.

STATES has states beside its KV; INT8 quantizes KV, with scales in tensors of their own.
"""
