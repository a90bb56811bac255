"""Layers: turns what vLLM says of each into what pdstore stores of it, or refuses it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from pdstore.adapters.vllm.tables import is_state, order_of_states, specs_of, specs_of_model
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import canonical
from pdstore.format.layout import Pipeline

Layers = dict[str, LayerSpec]
"""A layout's layers in their order. The keys are the names that vLLM gives them."""

SEE = "docs/models.md has a table of the models that run"

_OPAQUE_MODES = {
    "NONE",
    "FP8_PER_TENSOR",
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
}
"""The forms of quantized KV in which the bytes of a token and head contain their own scales, or in
which the scales are part of the weights."""

_INDEXER = "DEEPSEEK_V32_INDEXER"
"""vLLM's name of the kernels that use an indexer's pages, of DeepSeek V3.2 and of GLM-5."""


def views_of(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns vLLM's tensors in the form for `KVPool`, one KV group after another.

    A layer of tokens or pages: [blocks, tokens, local KV heads, K and V channels]. A layer with
    states: [blocks, 1, 1, bytes].
    """
    return {
        name: kv_caches[name].view(torch.uint8) if is_state(spec) else _view_of(name, kv_caches)
        for group in kv_cache_config.kv_cache_groups
        for name, spec in specs_of(group).items()
    }


def own_layers(vllm_config: Any, kv_cache_config: Any, views: Mapping[str, torch.Tensor]) -> Layers:
    """Returns the layers in this rank's cache, in the order of a layout.

    views: as `views_of` returns them. Raises LayoutError for layers that are not supported.
    """
    if not views:
        raise LayoutError("no layer of it has a KV cache; choose a smaller pipeline-parallel size")
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    layers: Layers = {}
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in specs_of(group).items():
            module = _module(vllm_config, name)
            if is_state(spec):
                device = views[name].device.type
                layers[name] = _state(spec, module, device, tp_size, table)
            else:
                layer = _of_tokens(name, spec, views[name], module, tp_size, table)
                layers[name] = replace(layer, optional=is_draft(vllm_config, name))
    if all(spec.form is not None for spec in layers.values()):
        raise LayoutError(
            "it has only layers with states or pages; choose a smaller pipeline-parallel size;"
            f" {SEE}"
        )
    blocks = {views[name].shape[:2] for name, spec in layers.items() if not spec.is_state}
    if len(blocks) > 1:
        sizes = sorted({tokens for _, tokens in blocks})
        counts = sorted({rows for rows, _ in blocks})
        raise LayoutError(
            f"KV groups with different block sizes, {sizes} tokens in {counts} blocks; {SEE}"
        )
    return in_order(layers)


def in_order(layers: Layers) -> Layers:
    """Returns layers in the order of a layout: by block table, and a draft model's at the end.

    If some have states, the order is the model's, so that a layer range ends early in a step. Of
    one number, layers of tokens come first: vLLM reports only such layers when it computes them,
    and a state counts as computed when a later one is reported.
    """
    if not any(spec.is_state for spec in layers.values()):
        return dict(sorted(layers.items(), key=lambda each: (each[1].optional, each[1].table)))

    def at(name: str) -> tuple[bool, Sequence[int], bool]:
        numbers = tuple(int(part) for part in name.split(".") if part.isdecimal())
        return layers[name].optional, numbers, layers[name].is_state

    return {name: layers[name] for name in sorted(layers, key=at)}


def is_draft(vllm_config: Any, name: str) -> bool:
    """Returns whether a layer is of a draft model that keeps KV of its own (EAGLE, MTP).

    vLLM numbers the layers of such a model behind the model's own, or puts `draft_model` in front.
    Those of a hybrid model's MTP have `mtp` in their names, and begin at 0 again.
    """
    if getattr(vllm_config, "speculative_config", None) is None:
        return False
    words = name.split(".")
    number = next((int(word) for word in words if word.isdecimal()), 0)
    hf_config = vllm_config.model_config.hf_text_config
    num_layers = getattr(hf_config, "num_hidden_layers", number + 1)
    return words[0] == "draft_model" or "mtp" in words or number >= num_layers


def all_layers(own: Callable[[], Layers]) -> tuple[Layers, Pipeline | None]:
    """Returns the model's layers in the layout's order, and their stages if there are several.

    All ranks of a pipeline must call it at the same time, to send each other what `own` returns. If
    `own` raises LayoutError on one rank, all ranks raise it, so that no rank waits for that rank.
    """
    ranks = parallel_state.get_pp_group()
    if ranks.world_size == 1:
        return own(), None
    try:
        mine: Layers | str = own()
    except LayoutError as error:
        mine = str(error)
    gathered: list[Layers | str] = [""] * ranks.world_size
    torch.distributed.all_gather_object(gathered, mine, group=ranks.cpu_group)
    return joined(gathered, ranks.rank_in_group)


def joined(gathered: Sequence[Layers | str], stage: int) -> tuple[Layers, Pipeline]:
    """Returns the layers of all stages, in the order that they would have on a single rank.

    gathered: for each stage, its layers in order, or why it is not supported.
    stage: the stage of this rank.
    Raises LayoutError for the first stage that is not supported.
    """
    layers: Layers = {}
    stage_of: dict[str, int] = {}
    for number, each in enumerate(gathered):
        if isinstance(each, str):
            raise LayoutError(f"pipeline stage {number}: {each}")
        layers |= each
        stage_of |= dict.fromkeys(each, number)
    layers = in_order(layers)
    return layers, Pipeline(tuple(stage_of[name] for name in layers), stage)


def report_computed(vllm_config: Any, names: Iterable[str], report: Callable[[str], None]) -> None:
    """Makes `report` be called with a layer's name when the layer is queued, where vLLM does not.

    vLLM calls a connector's hooks from the operation that most models attend with. DeepSeek V3.2
    and GLM-5 go without it: their `MLAAttention` has a `forward` of its own. It writes the layer's
    KV and its indexer's page, so both are queued when it returns. A step that replays CUDA graphs
    does not call `forward`.
    """
    for name in names:
        module = _module(vllm_config, name)
        if isinstance(module, MLAAttention) and type(module).forward is not MLAAttention.forward:
            module.register_forward_hook(lambda *_, name=name: report(name))


def page_of(vllm_config: Any, layer: str) -> str:
    """Returns the page format of vLLM's CPU backend, named by its kernels' instruction set."""
    module = _module(vllm_config, layer)
    isa = getattr(module, "isa", None)
    if isa is None:
        backend = getattr(module, "attn_backend", None)
        isa = backend.get_name() if backend is not None else "plain"
    return f"vllm-cpu:{isa}"


def refuse_states(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError if a model has layers with states that cannot be handed over."""
    described = specs_of_model(kv_cache_config)
    states = [
        (f"{f'layer {name}' if name else 'a layer'} of KV group {number}", spec)
        for number, name, spec in described
        if is_state(spec)
    ]
    if not states:
        return
    first_layer, first = states[0]
    where = f"{first_layer} keeps a state for a whole prefix"
    speculates = getattr(vllm_config, "speculative_config", None) is not None
    if speculates and getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            f"{where}, and with --use-replayssm and speculative decoding vLLM keeps a state of"
            f" earlier tokens, and the tokens since: turn off one of the two; {SEE}"
        )
    if len(states) == len(described):
        raise ConfigError(
            f"{where}, as all of the model's layers do, and pdstore needs a layer with KV of each"
            f" token beside them; {SEE}"
        )
    for layer, spec in states:
        kept = (spec.block_size, spec.mamba_cache_mode)
        if kept != (first.block_size, first.mamba_cache_mode) or kept[1] not in ("align", "none"):
            raise ConfigError(
                f"{layer} keeps states in blocks of {kept[0]} tokens in mode {kept[1]}, and"
                f" {first_layer} in blocks of {first.block_size} in mode {first.mamba_cache_mode}:"
                f" pdstore supports one size, in the modes align and none; {SEE}"
            )


def refuse_layers_without_tensors(kv_cache_config: Any) -> None:
    """Raises ConfigError if vLLM registers no tensor for a layer: HiSparse keeps KV elsewhere."""
    for number, name, spec in specs_of_model(kv_cache_config):
        if not getattr(spec, "has_layer_views", True):
            raise ConfigError(
                f"layer {name} of KV group {number} keeps its KV as {type(spec).__name__}, of which"
                f" pdstore gets no tensor: turn off HiSparse, which keeps KV in host memory; {SEE}"
            )


def _refuse(name: str, table: int, why: str) -> NoReturn:
    raise LayoutError(f"layer {name} of KV group {table} {why}; {SEE}")


def _view_of(name: str, kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    cache = kv_caches[name]
    if not isinstance(cache, torch.Tensor) or cache.dim() not in (3, 4):
        raise LayoutError(f"layer {name}: its KV cache is not a tensor of 3 or 4 dimensions")
    return cache.unsqueeze(2) if cache.dim() == 3 else cache.transpose(1, 2)


def _state(spec: Any, module: Any, device: str, tp_size: int, table: int) -> LayerSpec:
    """Returns a layer with states. Its form is all that gives meaning to a state's bytes."""
    form = canonical(
        [
            str(spec.mamba_type),
            [list(shape) for shape in spec.shapes],
            [str(dtype) for dtype in spec.dtypes],
            order_of_states(),
            device,
            None if module is None else module.get_attn_backend().get_name(),
        ]
    )
    return LayerSpec.state(
        spec.state_content_size_bytes,
        form,
        ranks=tp_size,
        table=table,
        is_whole=spec.tp_replicated,
    )


def _of_tokens(
    name: str, spec: Any, cache: torch.Tensor, module: Any, tp_size: int, table: int
) -> LayerSpec:
    """Returns a layer's shape. Raises LayoutError if its blocks hold anything but causal KV."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode not in _OPAQUE_MODES:
        _refuse(name, table, f"keeps scales apart from the tokens of a block ({mode})")
    _refuse_compressed_rows(name, spec, table)
    if getattr(spec, "non_causal", False):
        _refuse(name, table, "is not causal: its KV depends on later tokens")
    if _is_indexer(name, spec):
        return _pages(name, spec, cache, module, table)
    heads, channels = cache.shape[2:]
    if type(spec) is MLAAttentionSpec:
        return LayerSpec.latent(channels, table=table)
    head_dim = min(spec.head_size, channels) if hasattr(spec, "head_size") else channels
    full = LayerSpec(heads * tp_size, head_dim, value_dim=channels - head_dim, table=table)
    if type(spec) is SlidingWindowSpec:
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return replace(full, window=window)
    if type(spec) is FullAttentionSpec:
        return full
    _refuse(
        name,
        table,
        f"keeps its KV as {type(spec).__name__}; pdstore supports full attention, sliding windows,"
        " MLA, indexers of sparse attention, and states (Mamba, GDN, KDA, short convolutions)",
    )


def _refuse_compressed_rows(name: str, spec: Any, table: int) -> None:
    """Raises LayoutError for caches of sparse attention whose rows do not belong to one token."""
    tokens_per_row = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    version = getattr(spec, "model_version", None)
    if tokens_per_row not in (1, -1) or version is not None:  # -1: a state, no attention
        _refuse(
            name,
            table,
            f"keeps compressed attention ({tokens_per_row} tokens in a row, {version}): a row does"
            " not belong to one token",
        )


def _is_indexer(name: str, spec: Any) -> bool:
    """Returns True for the cache of an indexer of sparse attention.

    vLLM names an indexer's role from 0.30 on. In 0.26 an indexer is an MLA layer of bytes that
    names neither a cache dtype nor a quantization. An MLA layer with fp8 names both.
    """
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    is_bytes = getattr(spec, "dtype", None) is torch.uint8 and mode == "NONE"
    is_unnamed = getattr(spec, "cache_dtype_str", None) is None
    is_old = isinstance(spec, MLAAttentionSpec) and is_bytes and is_unnamed
    return _role_of(spec) == "indexer" or "indexer" in name.split(".") or is_old


def _role_of(spec: Any) -> str | None:
    return getattr(getattr(spec, "cache_role", None), "value", None)


def _pages(name: str, spec: Any, cache: torch.Tensor, module: Any, table: int) -> LayerSpec:
    """Returns an indexer's layer: its blocks are pages, which end with the scales of their tokens.

    Raises LayoutError for pages of other kernels than DeepSeek V3.2's and GLM-5's.
    """
    what = "is an indexer of sparse attention"
    kernels = None if module is None else module.get_attn_backend().get_name()
    if _role_of(spec) != "indexer":
        _refuse(
            name,
            table,
            f"{what}, whose blocks end with the scales of all their tokens, and this vLLM describes"
            " it as MLA, which has none: use vLLM 0.30 or newer",
        )
    if kernels != _INDEXER:
        _refuse(
            name,
            table,
            f"{what} with the kernels {kernels}, of whose pages pdstore knows nothing: it supports"
            f" those of {_INDEXER} (DeepSeek V3.2, GLM-5)",
        )
    if getattr(module, "uses_shuffled_layout", False):
        _refuse(name, table, f"{what} that shuffles the rows of its pages, as on ROCm")
    tokens, _, channels = cache.shape[1:]
    form = canonical([kernels, str(spec.dtype), tokens, channels, _scales_of_indexers()])
    return LayerSpec.page(tokens * channels * cache.itemsize, tokens, form, table=table)


def _scales_of_indexers() -> str:
    """Returns the type of the scales in an indexer's pages, which have four bytes in any case.

    From 0.33 on, Blackwell's kernels (SM100) keep the exponent of a scale in each of its bytes.
    """
    from vllm.utils import deep_gemm

    has_exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return "ue8m0" if has_exponents is not None and has_exponents() else "float32"


def _module(vllm_config: Any, layer: str) -> Any:
    """Returns the part of vLLM's model that computes a layer; None if it is not known."""
    return vllm_config.compilation_config.static_forward_context.get(layer)
