"""ModelShape: the numbers of a model, from its config.json, that fix its KV and its prefill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pdstore.errors import ConfigError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_NEMOTRON_TYPES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_STATES = ("linear_attention", "mamba", "mamba2", "conv", "kda")
_KEEPS = {**dict.fromkeys(_STATES, "state"), "mlp": "", "moe": ""}
"""What a layer of a type keeps; of all other types, the KV of each token."""


class Indexer(NamedTuple):
    """The part of a layer of sparse attention that chooses what it sees: `most_tokens` at most.

    heads, width: of its queries, which it compares with one key of each token.
    """

    heads: int
    width: int
    most_tokens: int

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's key: in fp8, with a float32 for each 128 elements."""
        return self.width + self.width // 128 * 4


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that fix the size of its KV and its prefill time.

    layers: those that keep KV of each token.
    kv_elements: elements of K and V together, of one token in one layer; for MLA, elements of the
      latent with its rope part.
    qk_dim, v_dim: elements of a query vector and of a V vector, per head.
    active_params: parameters that compute one token; the input embedding only looks it up. Of
      layers with states, their projections: what they do with the states is a percent or two more.
    state_layers: those that keep one state for all of a prefix: Mamba, gated delta nets and others.
    state_bytes: of the states of all these layers after one prefix.
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
    state_layers: int = 0
    state_bytes: int = 0
    indexer: Indexer | None = None

    @classmethod
    def of_config(cls, path: str) -> ModelShape:
        """Reads a config.json; `path` is the file or its directory. Raises ConfigError."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            document = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: name a model's config.json") from error
        try:
            shape = _shape_of(document, document.get("text_config") or document, file)
        except KeyError as error:
            raise ConfigError(f"{file} is no decoder's config.json: it has no {error}") from error
        except (TypeError, ZeroDivisionError, AttributeError) as error:
            raise ConfigError(f"{file} is no decoder's config.json: {error}") from error
        if not shape.layers:
            raise ConfigError(f"{file} has only layers with states, and pdstore needs some with KV")
        return shape

    def kv_bytes(self, element_bytes: int | None = None) -> int:
        """Returns the bytes of KV of one token, with what indexers keep of it."""
        of_attention = self.kv_elements * (element_bytes or _BYTES.get(self.dtype, 2))
        return self.layers * (of_attention + (self.indexer.token_bytes if self.indexer else 0))

    def prefill_flops(self, num_tokens: int) -> float:
        """Returns how many operations a prefill takes: matrix products and causal attention."""
        squares, chosen = num_tokens**2, 0
        if self.indexer is not None:  # it looks at all tokens, and the attention at a few of them
            squares -= max(0, num_tokens - self.indexer.most_tokens) ** 2
            chosen = self.layers * self.indexer.heads * self.indexer.width * num_tokens**2
        attention = self.layers * self.heads * (self.qk_dim + self.v_dim) * squares
        return 2 * self.active_params * num_tokens + attention + chosen


def _shape_of(document: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> ModelShape:
    types = _types_of_layers(config)
    keeps = [_KEEPS.get(name, "tokens") for name in types]
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    rank = config.get("kv_lora_rank")
    if rank:
        rope = config["qk_rope_head_dim"]
        nope = config["qk_nope_head_dim"]
        qk_dim = nope + rope
        v_dim = config["v_head_dim"]
        kv_elements = rank + rope
        kv_heads = 1
        attention = _mla_params(config, qk_dim) + _indexer_params(config)
    else:
        qk_dim = v_dim = head_dim
        kv_elements = 2 * kv_heads * head_dim
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mixers = keeps.count("tokens") * attention + keeps.count("state") * _state_params(config)
    named = config.get("dtype") or config.get("torch_dtype") or document.get("torch_dtype")
    dtype = str(named or "bfloat16").removeprefix("torch.")
    return ModelShape(
        name=(config.get("_name_or_path") or file.parent.name or config.get("model_type", "?")),
        layers=keeps.count("tokens"),
        heads=heads,
        kv_elements=kv_elements,
        qk_dim=qk_dim,
        v_dim=v_dim,
        active_params=(mixers + _mlp_params(config, types) + hidden * config["vocab_size"]),
        dtype=dtype,
        kv_heads=kv_heads,
        is_mla=bool(rank),
        longest_prompt=config.get("max_position_embeddings"),
        state_layers=keeps.count("state"),
        state_bytes=keeps.count("state") * _state_bytes(config, dtype),
        indexer=_indexer(config),
    )


def _types_of_layers(config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the type of each layer, by which `_KEEPS` tells what it keeps of a prompt."""
    types: Sequence[str] | None = config.get("layer_types") or config.get("layers_block_type")
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H: M-M*, also with E
        types = [_NEMOTRON_TYPES[letter] for letter in pattern]
    if types is not None:
        return types
    num_layers = config["num_hidden_layers"]
    if linear := config.get("linear_attn_config"):  # Kimi-Linear counts layers from 1
        of_states = set(linear["kda_layers"])
        return ["kda" if n in of_states else "attention" for n in range(1, num_layers + 1)]
    if interval := config.get("full_attention_interval"):  # Qwen3-Next
        return ["attention" if n % interval == 0 else "mamba" for n in range(1, num_layers + 1)]
    return ["attention"] * int(num_layers)


def _state_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Returns the bytes of one layer's state, of all ranks.

    It is the convolution's last inputs, in the model's dtype, and the recurrent state.
    """
    state_dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or dtype
    if "linear_num_value_heads" in config:  # gated delta nets
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        kernel, channels = config["linear_conv_kernel_dim"], 2 * keys + values
        recurrent = values * config["linear_key_head_dim"]
    elif linear := config.get("linear_attn_config"):  # KDA
        width = linear["num_heads"] * linear["head_dim"]
        kernel, channels = linear["short_conv_kernel_size"], 3 * width
        recurrent, state_dtype = width * linear["head_dim"], "float32"
    elif "conv_L_cache" in config:  # LFM2
        kernel, channels, recurrent = config["conv_L_cache"], config["hidden_size"], 0
    else:
        kernel, channels, recurrent = _mamba2_sizes(config)
        if "hybrid_override_pattern" in config:  # Nemotron-H
            state_dtype = config.get("mamba_ssm_cache_dtype") or "float32"
    in_conv = max(0, kernel - 1) * channels * _BYTES.get(dtype, 2)
    return int(in_conv + recurrent * _BYTES.get(state_dtype, 2))


def _state_params(config: Mapping[str, Any]) -> int:
    """Returns the number of parameters of the projections of one layer with a state."""
    hidden = config["hidden_size"]
    if "linear_num_value_heads" in config:  # in: Q, K, V, the gate, two numbers a head; out: V
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        heads = config["linear_num_value_heads"]
        values = heads * config["linear_value_head_dim"]
        return int(hidden * (2 * keys + 3 * values + 2 * heads))
    if linear := config.get("linear_attn_config"):  # KDA: in and out, and two gates of low rank
        heads, head_dim = linear["num_heads"], linear["head_dim"]
        width = heads * head_dim
        return int(hidden * (4 * width + heads) + 2 * head_dim * (hidden + width))
    if "conv_L_cache" in config:  # LFM2: in, with two gates, and out
        return int(hidden * 4 * hidden)
    heads, width, channels = _mamba2_widths(config)  # in: the gate, the convolution's, one a head
    return int(hidden * (2 * width + channels + heads))


def _mamba2_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the kernel and the channels of a Mamba2 layer's convolution, and its elements."""

    _, width, channels = _mamba2_widths(config)
    size = _first(config, "ssm_state_size", "mamba_d_state")
    return _first(config, "conv_kernel", "mamba_d_conv"), channels, width * size


def _mamba2_widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns a Mamba2 layer's heads, its width, and the channels of its convolution."""
    heads = _first(config, "mamba_num_heads", "mamba_n_heads")
    width = heads * _first(config, "mamba_head_dim", "mamba_d_head")
    size = _first(config, "ssm_state_size", "mamba_d_state")
    return heads, width, width + 2 * _first(config, "n_groups", "mamba_n_groups") * size


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Returns the first of these numbers that a config has; 0 if it has none."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _mla_params(config: Mapping[str, Any], qk_dim: int) -> int:
    """Returns the number of parameters of one layer's latent attention."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    rope = config["qk_rope_head_dim"]
    nope = config["qk_nope_head_dim"]
    v_dim = config["v_head_dim"]
    q_rank = config["q_lora_rank"]
    query = q_rank * (hidden + heads * qk_dim) if q_rank else hidden * heads * qk_dim
    return int(
        query + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    )


def _indexer(config: Mapping[str, Any]) -> Indexer | None:
    if not config.get("index_topk"):
        return None
    return Indexer(config["index_n_heads"], config["index_head_dim"], config["index_topk"])


def _indexer_params(config: Mapping[str, Any]) -> int:
    """Returns the number of parameters of one layer's indexer; 0 without sparse attention."""
    indexer = _indexer(config)
    if indexer is None:
        return 0
    key_and_weights = config["hidden_size"] * (indexer.width + indexer.heads)
    return int(config["q_lora_rank"] * indexer.heads * indexer.width + key_and_weights)


def _mlp_params(config: Mapping[str, Any], types: Sequence[str]) -> int:
    """Returns how many MLP parameters compute a token: of experts, only those that get it."""
    if "mlp" in types or "moe" in types:
        return _nemotron_mlp_params(config, types)
    hidden = config["hidden_size"]
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    dense_layers = (config.get("first_k_dense_replace") or 0) if experts else len(types)
    total = dense_layers * 3 * hidden * config["intermediate_size"] if dense_layers else 0
    if experts:
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        active = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
        total += (len(types) - dense_layers) * hidden * (3 * width * active + experts)
    return int(total)


def _nemotron_mlp_params(config: Mapping[str, Any], types: Sequence[str]) -> int:
    """Returns the same of Nemotron-H: its MLPs are layers, of two matrices, since none has a gate.

    Experts may work on a latent, to which two matrices of the layer lead, there and back.
    """
    hidden = config["hidden_size"]
    total = types.count("mlp") * 2 * hidden * _first(config, "intermediate_size")
    if "moe" in types:
        latent = _first(config, "moe_latent_size")
        of_experts = config["num_experts_per_tok"] * config["moe_intermediate_size"]
        shared = _first(config, "n_shared_experts")
        of_shared = shared * _first(config, "moe_shared_expert_intermediate_size")
        of_layer = 2 * (latent or hidden) * of_experts + 2 * hidden * (of_shared + latent)
        total += types.count("moe") * (of_layer + hidden * config["n_routed_experts"])
    return int(total)
