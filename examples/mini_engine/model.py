"""A Hugging Face decoder that computes over the engine's paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import transformers

from examples.mini_engine.attention import Chunk, Step, paged_attention
from examples.mini_engine.config import Config
from examples.mini_engine.paged_cache import PagedCache
from pdstore import ConfigError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES_BY_LENGTH = ("dynamic", "longrope")
_ATTENTION = "mini_engine"


class Model:
    """The weights, the tokenizer, and the numbers of the checkpoint that the engine needs.

    Raises ConfigError for a checkpoint whose KV it cannot page.
    """

    def __init__(self, config: Config) -> None:
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"--device {config.device}: torch sees no CUDA device")
        transformers.utils.logging.disable_progress_bar()  # a log needs no moving bar
        try:
            load: dict[str, Any] = {
                "pretrained_model_name_or_path": config.model,
                "local_files_only": True,
            }
            self._hf_config = transformers.AutoConfig.from_pretrained(**load)
            _check(self._hf_config)
            transformers.AttentionInterface.register(_ATTENTION, paged_attention)
            causal_lm: Any = transformers.AutoModelForCausalLM  # its types are wrappers
            self._network = causal_lm.from_pretrained(
                **load, dtype=getattr(torch, config.dtype), attn_implementation=_ATTENTION
            )
            self._network.to(config.device).eval()
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(**load)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--model {config.model}: {error}") from error
        self.num_layers: int = self._hf_config.num_hidden_layers
        self.num_kv_heads: int = self._hf_config.num_key_value_heads
        self.head_dim: int = self._network.model.layers[0].self_attn.head_dim
        self.width: int = self._hf_config.hidden_size
        self.vocab_size: int = self._hf_config.vocab_size
        self.max_model_len = _context(self._hf_config, config.max_model_len)
        self.end_ids = _end_ids(self._network.generation_config.eos_token_id)

    @property
    def rope(self) -> str:
        """The parameters that rotate K, as canonical text for the namespace."""
        names = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
        rope = {name: getattr(self._hf_config, name, None) for name in names}
        return json.dumps(rope, sort_keys=True)

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        cache: PagedCache,
        layer_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Computes the chunks' KV into the cache.

        Returns logits [n, vocabulary] of the n chunks that end their request's tokens.
        layer_written: see `Step`.
        """
        step = Step(chunks, cache, layer_written)
        hidden = self._network.model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            step=step,
        ).last_hidden_state[0]
        ends = []
        for chunk, end in zip(chunks, accumulate(c.num_tokens for c in chunks), strict=True):
            num_prompt = min(chunk.stop, chunk.request.num_prompt) - chunk.start
            chunk.request.num_prefill_tokens += max(0, num_prompt)
            if cache.states is not None:
                inputs = self._network.model.embed_tokens(
                    step.token_ids[end - chunk.num_tokens : end]
                )
                hidden[end - 1] += cache.states.advance(chunk.request, chunk.start, inputs)
            if chunk.is_last:
                ends.append(end - 1)
        if cache.states is not None and layer_written is not None:
            layer_written(self.num_layers)
        logits: torch.Tensor = self._network.lm_head(hidden[ends]).float()
        if logits.is_cuda:  # else blocks of an aborted request could be lent while still written
            torch.cuda.synchronize(logits.device)
        return logits


def _check(config: transformers.PretrainedConfig) -> None:
    if config.model_type not in _FAMILIES:
        raise ValueError(f"model type {config.model_type!r}: this engine knows {_FAMILIES}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in _ROPES_BY_LENGTH:
        raise ValueError(
            f"rope type {rope['rope_type']!r} rotates K by the length: no block of KV can be kept"
        )


def _context(config: transformers.PretrainedConfig, asked: int | None) -> int:
    limit: int = config.max_position_embeddings
    if asked is not None and asked > limit:
        raise ConfigError(f"--max-model-len {asked} is over the model's {limit}")
    return asked or limit


def _end_ids(eos: int | list[int] | None) -> frozenset[int]:
    return frozenset([eos] if isinstance(eos, int) else eos or [])
