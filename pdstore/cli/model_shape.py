"""ModelShape: the numbers of a model's config.json that KV and prefill time follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdstore.errors import ConfigError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that its KV and its prefill time follow from.

    kv_elements: of one token in one layer, K and V together; for MLA the latent with its rope part.
    qk_dim, v_dim: elements of a query and of a value, per head.
    active_params: parameters that a token passes, without the input embedding, which is a look-up.
    """

    name: str
    layers: int
    heads: int
    kv_elements: int
    qk_dim: int
    v_dim: int
    active_params: float
    dtype: str
    kv_heads: int
    is_mla: bool
    longest_prompt: int | None = None

    @classmethod
    def of(cls, path: str) -> ModelShape:
        """Reads a config.json, or the one in a directory. Raises ConfigError."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            document = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: name a model's config.json") from error
        try:
            return _shape_of(document, document.get("text_config") or document, file)
        except KeyError as error:
            raise ConfigError(f"{file} is no decoder's config.json: it has no {error}") from error
        except (TypeError, ZeroDivisionError, AttributeError) as error:
            raise ConfigError(f"{file} is no decoder's config.json: {error}") from error

    @property
    def dtype_bytes(self) -> int:
        return _BYTES.get(self.dtype, 2)

    def kv_bytes(self, element_bytes: int | None = None) -> int:
        """Returns the bytes of KV of one token."""
        return self.layers * self.kv_elements * (element_bytes or self.dtype_bytes)

    def prefill_flops(self, num_tokens: int) -> float:
        """Returns the operations of a prefill: matrices once, attention over the causal half."""
        attention = self.layers * self.heads * (self.qk_dim + self.v_dim) * num_tokens**2
        return 2 * self.active_params * num_tokens + attention


def _shape_of(document: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> ModelShape:
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    rank = config.get("kv_lora_rank")
    if rank:
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        qk_dim, v_dim, kv_elements, kv_heads = nope + rope, config["v_head_dim"], rank + rope, 1
        attention = _mla_params(config, qk_dim)
    else:
        qk_dim = v_dim = head_dim
        kv_elements = 2 * kv_heads * head_dim
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dtype = config.get("dtype") or config.get("torch_dtype") or document.get("torch_dtype")
    return ModelShape(
        name=(config.get("_name_or_path") or file.parent.name or config.get("model_type", "?")),
        layers=layers,
        heads=heads,
        kv_elements=kv_elements,
        qk_dim=qk_dim,
        v_dim=v_dim,
        active_params=layers * attention + _mlp_params(config) + hidden * config["vocab_size"],
        dtype=str(dtype or "bfloat16").removeprefix("torch."),
        kv_heads=kv_heads,
        is_mla=bool(rank),
        longest_prompt=config.get("max_position_embeddings"),
    )


def _mla_params(config: Mapping[str, Any], qk_dim: int) -> int:
    """Parameters of one layer's latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v_dim, q_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    query = q_rank * (hidden + heads * qk_dim) if q_rank else hidden * heads * qk_dim
    return int(
        query + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    )


def _mlp_params(config: Mapping[str, Any]) -> int:
    """Parameters of all layers' MLPs that a token passes; of the experts, those it is sent to."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts")
    dense_layers = (config.get("first_k_dense_replace") or 0) if experts else layers
    total = dense_layers * 3 * hidden * config["intermediate_size"] if dense_layers else 0
    if experts:
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        active = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
        total += (layers - dense_layers) * hidden * (3 * width * active + experts)
    return int(total)


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((config[name] for name in names if config.get(name)), 0)
