"""The instances of a run: one alone, and a P and a D for each store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.handoff.exact import (
    LOG,
    WAYS,
    Answers,
    chunks_in,
    with_choices_sorted,
    with_used_blocks,
    without_states_and_pages,
)
from benchmarks.handoff.instance import Instance
from benchmarks.handoff.mini import PRELOAD, VOCABULARY, MiniInstance
from benchmarks.handoff.vllm import VllmInstance
from benchmarks.peers import PEER_MODES, peer_of
from benchmarks.shapes import Model
from benchmarks.vllm_engine import ENVIRONMENT
from examples.vllm_serve import CPU_ENVIRONMENT


class Setup:
    """The instances of one run, of the mini engine.

    scratch: for the checkpoint and the logs.
    tree: the checkout whose code the next pairs run; None: this one's.
    alone: the instance without a pool; None: not started.
    stateless: of --exact, by the pair's name: a D that loads neither states nor pages of indexers.
    """

    def __init__(self, scratch: Path, given: argparse.Namespace) -> None:
        self._scratch, self._given = scratch, given
        (scratch / "logs").mkdir(exist_ok=True)
        self.instances: list[Instance] = []
        self.tree: Path | None = None
        self.alone: Instance | None = None
        self.pairs: dict[str, tuple[Instance, Instance]] = {}
        self.control: Instance | None = None
        self.stateless: dict[str, Instance] = {}
        self.model = ""
        self._model_of: dict[str, str] = {}
        self.prepare()

    def prepare(self) -> None:
        """Makes the checkpoint that all instances serve."""
        from benchmarks.checkpoint import Shape, make_model

        given = self._given
        self._model = self._scratch / "model"
        shape = Shape(VOCABULARY, given.layers, given.hidden, max(given.tokens) + 128)
        make_model(shape, self._model, "cpu" if given.cpu else "cuda:0", self._dtype)

    def start_alone(self) -> None:
        """Starts the instance without a pool, on the first GPU, and the one for --control."""
        block = self._given.block[0]
        self.alone = self._start("alone", {}, 0, block)
        if self._given.control:
            self.control = self._start("control", {}, 0, block)

    def start_pair(self, name: str, url: str, block: int) -> None:
        """Starts P on the first GPU, and D on the second if there is one.

        block: tokens of a block of vLLM.
        """
        common = {"store": url, "weights": "bench"}
        self._model_of[name] = self.model
        self.pairs[name] = (
            self._start(f"{name}-p", common | {"role": "prefill"}, 0, block),
            self._start(f"{name}-d", common | {"role": "decode"}, 1, block),
        )

    def tokens_of(self, pair: str, tokens: int) -> int:
        """Returns the tokens of a pair's prompts: as many bytes as the first model's have."""
        return tokens

    def ready(self) -> dict[str, Any]:
        """Waits for all. Returns what each says about itself."""
        return {each.name: each.ready(400) for each in self.instances}

    def stop(self) -> None:
        for each in self.instances:
            each.stop()

    @property
    def _dtype(self) -> str:
        return "float32" if self._given.cpu else "bfloat16"

    def _start(self, name: str, settings: dict[str, Any], gpu: int, block: int) -> Instance:
        import torch

        given = self._given
        gpus = 0 if given.cpu else torch.cuda.device_count()
        arguments = {
            "model": str(self._model),
            "settings": settings,
            "device": "cpu" if given.cpu else f"cuda:{min(gpu, gpus - 1)}",
            "dtype": self._dtype,
            "chunk": given.chunk,
            "num_tokens": max(given.tokens),
            "kv_tokens": max(max(given.tokens), given.burst * given.burst_tokens) + 4096,
            "max_seqs": max(2, given.burst),
        }
        log = self._scratch / "logs" / f"{name}.log"
        instance = Instance(
            name, MiniInstance, arguments, dict(os.environ), log, PRELOAD, self.tree
        )
        self.instances.append(instance)
        return instance


class VllmSetup(Setup):
    """The instances of one run, of vLLM with dummy weights.

    model: the one of --models that the next instances serve.
    """

    def prepare(self) -> None:
        given = self._given
        shape = {"num_hidden_layers": given.layers, "hidden_size": given.hidden}
        shape |= {"num_attention_heads": given.hidden // 128, "vocab_size": VOCABULARY}
        shape |= {"num_key_value_heads": max(1, given.hidden // 512)}
        shape |= {"intermediate_size": given.hidden * 7 // 2}
        self.models = {
            name: Model.open(
                name, self._scratch / f"model-{number}", **(shape if name == "llama-8b" else {})
            )
            for number, name in enumerate(given.models)
        }
        self.model = given.models[0]

    def tokens_of(self, pair: str, tokens: int) -> int:
        return self._like_the_first(self._model_of[pair], tokens)

    def _like_the_first(self, name: str, tokens: int) -> int:
        first, *_ = self._given.models
        return tokens if name == first else self.models[name].like(self.models[first], tokens)

    def start_stateless(self, stores: Mapping[str, str]) -> None:
        """Starts for each store a D that loads the KV of prompts' tokens and nothing else."""
        for name, url in stores.items():
            settings = {"store": url, "weights": "bench", "role": "decode"}
            arguments = self._arguments_of_pdstore(settings, self._given.block[0])
            self.stateless[name] = self._start_vllm(
                f"{name}-x", arguments, 1, make=without_states_and_pages
            )

    def answers(self) -> dict[str, Answers]:
        """Returns for each store the instances that --exact compares."""
        has_states = self.models[self.model].has_states
        chunks = chunks_in(self._scratch)
        return {
            name: Answers(pair, self.stateless[name], self.alone, chunks, drops_last=has_states)
            for name, pair in self.pairs.items()
        }

    def start_pair(self, name: str, url: str, block: int) -> None:
        """As above. A peer of pdstore goes by its name, without a URL."""
        if url not in PEER_MODES:
            super().start_pair(name, url, block)
            return
        self._model_of[name] = self.model
        pair = [self._start_peer(f"{name}-{end}", url, end, block) for end in ("p", "d")]
        self.pairs[name] = (pair[0], pair[1])

    def _start_peer(self, name: str, peer_name: str, end: str, block: int) -> Instance:
        peer = peer_of(peer_name, "kv_producer" if end == "p" else "kv_consumer")
        arguments = self._arguments(block) | {"kv_transfer_config": peer.transfer}
        return self._start_vllm(name, arguments, int(end == "d"), peer.environment)

    def _start(self, name: str, settings: dict[str, Any], gpu: int, block: int) -> Instance:
        is_compared = self._given.exact and settings.get("role") == "decode"
        make = with_choices_sorted if self._given.exact else VllmInstance
        make = with_used_blocks if is_compared else make
        return self._start_vllm(name, self._arguments_of_pdstore(settings, block), gpu, make=make)

    def _arguments_of_pdstore(self, settings: dict[str, Any], block: int) -> dict[str, Any]:
        """settings: of pdstore; without any there is no pool."""
        arguments = self._arguments(block)
        if settings:
            extra = {k: v for k, v in settings.items() if k != "role"}
            kind = {"prefill": "kv_producer", "decode": "kv_consumer"}[settings["role"]]
            arguments["kv_transfer_config"] = {
                "kv_connector": "PDStoreConnector",
                "kv_connector_module_path": "pdstore.adapters.vllm",
                "kv_role": kind,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        return arguments

    def _start_vllm(
        self,
        name: str,
        arguments: dict[str, Any],
        gpu: int,
        more: Mapping[str, str] | None = None,
        make: Callable[..., VllmInstance] = VllmInstance,
    ) -> Instance:
        """more: of the environment."""
        environment = ENVIRONMENT | self._environment(gpu) | dict(more or {})
        if self._given.exact:
            environment[LOG] = str(chunks_in(self._scratch))
        log = self._scratch / "logs" / f"{name}.log"
        instance = Instance(name, make, {"arguments": arguments}, environment, log, tree=self.tree)
        self.instances.append(instance)
        return instance

    def _environment(self, gpu: int) -> dict[str, str]:
        import torch

        if self._given.cpu:
            return CPU_ENVIRONMENT
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[min(gpu, len(visible) - 1)]}

    @property
    def _dtype(self) -> str:
        is_small = self._given.cpu and not self.models[self.model].has_states
        return "float32" if is_small else "bfloat16"  # vLLM's CPU backend has no others for states

    def _arguments(self, block: int) -> dict[str, Any]:
        given = self._given
        model = self.models[self.model]
        longest = max(self._like_the_first(self.model, tokens) for tokens in given.tokens)
        most = max(longest, given.burst * given.burst_tokens) + 512
        arguments: dict[str, Any] = {
            "model": str(model.path),
            **{"load_format": model.load_format, "skip_tokenizer_init": True, "seed": 0},
            **{"dtype": self._dtype, "max_model_len": max(longest, 1024) + 512},
            **{"max_num_seqs": 8, "max_num_batched_tokens": given.chunk},
        }
        if model.has_states:  # vLLM chooses the size of their blocks, and how they are computed
            arguments["enable_prefix_caching"] = True
        if given.cpu:
            arguments |= {"enforce_eager": True, "block_size": 64}
            arguments["num_gpu_blocks_override"] = most // 32
        else:
            arguments |= {
                "gpu_memory_utilization": 0.05,
                "kv_cache_memory_bytes": model.cache_bytes(most + 4096),
                "compilation_config": {
                    **{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
                    "cudagraph_capture_sizes": [1, 2, 4, 8],
                },
            }
            if model.is_mla and not model.has_states:
                arguments["block_size"] = 64  # of its kernels, which vLLM chooses
            elif not model.has_states:
                arguments |= {"attention_backend": "FLASH_ATTN", "block_size": block}
        arguments |= WAYS[given.exact] if given.exact else {}
        return {**arguments, **given.vllm}


ENGINES: dict[str, Callable[[Path, argparse.Namespace], Setup]] = {"mini": Setup, "vllm": VllmSetup}
