"""Sizing: the size of a model's KV, and the bandwidth above which loading it beats computing it.

`python -m pdstore.sizing CONFIG` prints both for the model of a config.json; see docs/sizing.md.

T_c is the time to compute a prompt of p tokens, B* the bandwidth, N the active parameters:
T_c = F(p) / (GPUs * peak * MFU)      F(p) = 2 * N * p + layers * heads * (d_qk + d_v) * p^2
B*  = (p * (KV bytes of a token) + (bytes of the states)) / T_c
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pdstore.errors import ConfigError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_GB = 1e9
PEAK_TFLOPS = {
    **{"A100": 312, "A800": 312, "A10": 125, "L4": 121, "L40S": 362, "4090": 165},
    **{"H20": 148, "H100": 989, "H800": 989, "H200": 989, "GH200": 989, "B200": 2250},
}
"""Dense bf16 operations in TFLOPS, from the makers' data sheets."""
DEFAULT_MFU = 0.5
_PROMPTS = (1024, 8192, 32_768, 131_072)
"""Tokens of the prompts in the printed table, unless the user names prompts."""
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


class Comparison(NamedTuple):
    """A comparison of reading a prompt's KV with computing it on GPUs that do nothing else.

    compute_s: the time of the prefill. bytes_per_s: the rate at which reading the KV from a store
      takes as long as the prefill.
    """

    num_tokens: int
    kv_bytes: int
    compute_s: float
    bytes_per_s: float


class Machine(NamedTuple):
    """The GPUs of an instance, and `mfu`, the part of their peak rate that a prefill reaches."""

    gpu: str
    num_gpus: int = 1
    mfu: float = DEFAULT_MFU

    @property
    def flops(self) -> float:
        """Operations per second. Raises ConfigError for an unknown GPU."""
        peak = PEAK_TFLOPS.get(self.gpu.upper().removeprefix("RTX"))
        if peak is None:
            raise ConfigError(f"--gpu {self.gpu}: known are {', '.join(PEAK_TFLOPS)}")
        return peak * 1e12 * self.num_gpus * self.mfu


def break_even(
    shape: ModelShape, machine: Machine, num_tokens: int, element_bytes: int | None = None
) -> Comparison:
    """Compares reading the KV of `num_tokens` tokens, with the states, with computing it."""
    kv_bytes = num_tokens * shape.kv_bytes(element_bytes) + shape.state_bytes
    compute_s = shape.prefill_flops(num_tokens) / machine.flops
    return Comparison(num_tokens, kv_bytes, compute_s, kv_bytes / compute_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the sizes that the arguments ask for. Returns 0, or 2 for a wrong argument."""
    asked = _parser().parse_args(arguments)
    try:
        shape = ModelShape.of_config(asked.config)
        if asked.params:
            shape = replace(shape, active_params=asked.params)
        return _print_break_even(shape, asked)
    except ConfigError as error:
        print(f"pdstore.sizing: {error}", file=sys.stderr)
        return 2


def _print_break_even(shape: ModelShape, asked: argparse.Namespace) -> int:
    """Prints, for each prompt, the bandwidth above which reading is faster than computing."""
    machine = Machine(asked.gpu, asked.gpus, asked.mfu)
    element_bytes = asked.kv_element_bytes
    kv_bytes = shape.kv_bytes(element_bytes)
    prompts = asked.prompt or _PROMPTS
    rows = [break_even(shape, machine, length, element_bytes) for length in prompts]
    if asked.json:
        document = {
            "model": shape.name,
            "active_params": shape.active_params,
            "kv_bytes_per_token": kv_bytes,
            "million_tokens_bytes": 1_000_000 * kv_bytes,
            "state_bytes": shape.state_bytes,
            "machine": machine._asdict(),
            "break_even": [row._asdict() for row in rows],
        }
        print(json.dumps(document, indent=1))
        return 0
    _print_shape(shape, kv_bytes)
    verdict = f"   at {asked.bandwidth:g} GB/s" if asked.bandwidth else ""
    computed = f"compute on {machine.num_gpus} {machine.gpu}"
    print(f"{'prompt':>7}  {'KV':>9}  {computed:>18}  {'break-even':>11}{verdict}")
    for row in rows:
        if asked.bandwidth:
            read_s = row.kv_bytes / (asked.bandwidth * _GB)
            verdict = f"   compute (a read: {read_s:.3g} s)"
            if read_s < row.compute_s:
                verdict = f"   read, {read_s:.3g} s"
        print(
            f"{row.num_tokens:7,}  {row.kv_bytes / _GB:6.3g} GB  {row.compute_s:16.3g} s"
            f"  {row.bytes_per_s / _GB:6.3g} GB/s{verdict}"
        )
    print(
        f"one prompt alone, {machine.mfu:.0%} of the peak; reading wins above break-even,"
        " and concurrent loads share the bandwidth"
    )
    return 0


def _print_shape(shape: ModelShape, kv_bytes: int) -> None:
    print(
        f"{shape.name}: {kv_bytes / 1024:.4g} KiB of KV a token,"
        f" {kv_bytes * 1e6 / _GB:.3g} GB a million; {shape.active_params / 1e9:.3g} B parameters"
        " active"
    )
    if shape.state_bytes:
        print(
            f"states of {shape.state_layers} layers: {shape.state_bytes / 2**20:.3g} MiB after each"
            f" prefix that is kept, as much as {shape.state_bytes // kv_bytes:,} tokens of KV"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdstore.sizing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("config", help="a model's config.json, or its directory")
    add("--gpu", default="H100", help=f"GPU of the prefill instance: {', '.join(PEAK_TFLOPS)}")
    add("--gpus", type=int, default=1)
    add("--mfu", type=float, default=DEFAULT_MFU, help="the prefill's share of the GPU's peak")
    add("--prompt", type=int, action="append", help="a prompt's length in tokens; may be repeated")
    add("--kv-element-bytes", type=int, help="bytes of an element of KV; 1 for fp8")
    add("--params", type=float, help="active parameters, such as 37e9")
    add("--bandwidth", type=float, help="the store's GB/s; prints which way is faster")
    add("--json", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
