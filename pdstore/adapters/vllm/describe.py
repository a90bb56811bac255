"""Turns vLLM's configuration, KV cache and requests into settings, layouts, revisions and keys."""

# Decision: docs/decisions/033-vllm-namespace.md
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from pdstore.adapters.vllm.contents import Content
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import SHAPING, Json, PromptKeys, canonical, shaping
from pdstore.format.layout import Layout, Pipeline
from pdstore.format.weights import weights_revision
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings

log = logging.getLogger("vllm.pdstore")

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}

Layers = dict[str, LayerSpec]
"""A layout's layers in their order. The keys are the names that vLLM gives them."""


def settings_of(vllm_config: Any) -> Settings:
    """Returns the settings; `kv_connector_extra_config` wins over the environment.

    Raises ConfigError.
    """
    transfer = vllm_config.kv_transfer_config
    given = dict(transfer.kv_connector_extra_config)
    if transfer.kv_role in _ROLES:
        given.setdefault("role", _ROLES[transfer.kv_role])
    return read_settings(**given)


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError, with the reason, for a configuration that is not supported."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError(
            "this model has no KV cache, so there is nothing to hand over: turn pdstore off"
            " (PD_TRANSFER_VIA_STORAGE=0, and no PDStoreConnector in --kv-transfer-config)"
        )
    has_windows = any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups)
    is_old = not hasattr(base, "KVConnectorTransferResults")
    refusals = {
        "several KV groups or sliding windows with this old vLLM (it does not announce the blocks"
        " it gives back, and cannot be told that a load failed as a whole)": (
            is_old and (len(groups) > 1 or has_windows)
        ),
        "ROCm (it packs pages differently)": torch.version.hip is not None,
        "KV cache scales that are calculated at run time": getattr(
            vllm_config.cache_config, "calculate_kv_scales", False
        ),
        "decode context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "sleep mode (it frees the KV cache that pdstore copies from)": getattr(
            vllm_config.model_config, "enable_sleep_mode", False
        ),
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise ConfigError(f"pdstore does not support {what}: turn off one of the two")


def hashes_items(vllm_config: Any) -> bool:
    """Returns True if requests with images, sounds and videos can use the pool.

    Otherwise logs a warning and returns False. Two of vLLM's caches need names of such items. With
    both caches off, vLLM numbers the items from 1 in each process, so no other process finds them.
    What encoders made of items may also come from other processes, by a name that a client chose.
    """
    options = getattr(vllm_config.model_config, "multimodal_config", None)
    if options is None:
        return True
    why = ""
    has_cache = vllm_config.cache_config.enable_prefix_caching
    if not (has_cache or getattr(options, "mm_processor_cache_gb", 1)):
        why = (
            "without prefix caching and with --mm-processor-cache-gb 0 vLLM does not hash such"
            " items"
        )
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        why = "with --ec-transfer-config vLLM takes what an encoder made of them from elsewhere"
    if why:
        log.warning("requests with images, sounds or videos bypass the pool: %s", why)
    return not why


def tells_paths_apart() -> bool:
    """Returns whether vLLM's prefix cache tells LoRA adapters of one name apart by their paths."""

    def extra_keys_at(path: str) -> Any:
        adapter = SimpleNamespace(lora_name="name", lora_path=path, lora_int_id=1)
        request = SimpleNamespace(
            lora_request=adapter, mm_features=[], cache_salt=None, prompt_embeds=None
        )
        return kv_cache_utils.generate_block_hash_extra_keys(request, 0, 1, 0)

    try:
        return bool(extra_keys_at("/one") != extra_keys_at("/other"))
    except (AttributeError, TypeError):  # another vLLM
        return False


def layout_of(
    settings: Settings,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Returns the layout of one rank's KV cache, and its tensors in the form for `KVPool`.

    kv_caches: vLLM's tensors, [blocks, local KV heads, tokens, channels]; for MLA,
      older versions of vLLM leave out the dimension of heads. The returned tensors are views of
      them: [blocks, tokens, local KV heads, K and V channels].
    All stages of a pipeline must call it at the same time, to send each other their layers.
    Raises LayoutError for layers or sharding that are not supported.
    """
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    views: dict[str, torch.Tensor] = {}

    def own_layers() -> Layers:
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        views.update({name: _view_of(name, kv_caches[name]) for name in names})
        return _own_layers(kv_cache_config, views, tp_size)

    layers, pipeline = _all_layers(own_layers)
    has_items = getattr(vllm_config.model_config, "multimodal_config", None) is not None
    own_name, first = next(iter(views.items()))
    hf_config = vllm_config.model_config.hf_text_config
    weights = vllm_config.model_config.quantization
    cache_dtype = vllm_config.cache_config.cache_dtype
    is_plain = weights is None and cache_dtype == "auto"
    layout = Layout.of(
        settings,
        dtype=str(first.dtype).removeprefix("torch."),
        layers=list(layers.values()),
        engine_block_tokens=first.shape[1],
        gives_back=True,
        rope=_shaping(vllm_config, list(layers)),
        quantization=None if is_plain else canonical([weights, str(cache_dtype)]),
        page=_page(vllm_config, own_name) if first.device.type == "cpu" else None,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=tp_size,
        draft_layers=max(0, len(layers) - getattr(hf_config, "num_hidden_layers", len(layers))),
        pipeline=pipeline,
        items="name, sha256" if has_items else None,
    )
    return layout, views


def _view_of(name: str, cache: Any) -> torch.Tensor:
    if not isinstance(cache, torch.Tensor) or cache.dim() not in (3, 4):
        raise LayoutError(f"layer {name}: its KV cache is not a tensor of 3 or 4 dimensions")
    return cache.unsqueeze(2) if cache.dim() == 3 else cache.transpose(1, 2)


def layers_by_step(vllm_config: Any, layout: Layout, names: Sequence[str]) -> Sequence[str]:
    """Returns the layers whose KV can be saved during a step: those computed once in it.

    If a step has microbatches, vLLM computes each layer once for each of them. If there is a draft
    model, vLLM computes its layers once for each drafted token. In both cases no layer is returned,
    because KV is complete only at the end of the step.
    """
    parallel = vllm_config.parallel_config
    splits = getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False)
    return () if splits or layout.identity.draft_layers else names


def revision_of(settings: Settings, vllm_config: Any) -> str:
    """Returns the revision of the model's weights.

    If the draft model is another checkpoint, the draft model's revision is appended.
    Raises ConfigError if no revision is found and the user must set it.
    """
    model = vllm_config.model_config
    load_format = vllm_config.load_config.load_format
    revision = _revision(settings, model, load_format)
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if settings.weights or draft is None or draft.model == model.model:
        return revision
    return f"{revision}+{_revision(settings, draft, load_format)}"


def _revision(settings: Settings, model: Any, load_format: str) -> str:
    if not settings.weights and load_format == "dummy":
        raise ConfigError("weights of load format dummy have no revision: set PDSTORE_WEIGHTS")
    commit = getattr(model.hf_config, "_commit_hash", None)
    is_weights = getattr(model, "hf_config_path", None) in (None, model.model)
    if not settings.weights and commit and is_weights and not Path(model.model).is_dir():
        variant = model.model.partition(":")[2]  # names a GGUF file of a repository
        return f"commit:{commit}:{variant}" if variant else f"commit:{commit}"
    return weights_revision(model.model, settings)


def _all_layers(own: Callable[[], Layers]) -> tuple[Layers, Pipeline | None]:
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

    gathered: for each stage, its layers sorted by block table, or why it is not supported.
    stage: the stage of this rank.
    Raises LayoutError for the first stage that is not supported.
    """
    layers: list[tuple[str, LayerSpec, int]] = []
    for number, each in enumerate(gathered):
        if isinstance(each, str):
            raise LayoutError(f"pipeline stage {number}: {each}")
        layers += [(name, spec, number) for name, spec in each.items()]
    layers.sort(key=lambda each: each[1].table)  # stable: layers of one table keep their order
    stages = tuple(number for _, _, number in layers)
    return {name: spec for name, spec, _ in layers}, Pipeline(stages, stage)


def _own_layers(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], tp_size: int
) -> Layers:
    """Returns the layers in this rank's cache, one KV group after another."""
    if not kv_caches:
        raise LayoutError("no layer of it has a KV cache; choose a smaller pipeline-parallel size")
    blocks = {cache.shape[1] for cache in kv_caches.values()}
    if len(blocks) > 1:
        raise LayoutError(f"KV groups with different block sizes, {sorted(blocks)} tokens")
    layers: Layers = {}
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = by_layer.get(name, group.kv_cache_spec)
            layers[name] = _layer_spec(name, spec, kv_caches[name], tp_size, table)
    has_copies = getattr(kv_cache_config, "kv_tp_replicas", 1) > 1
    # each rank holds an MLA layer whole, whatever the number of heads
    if has_copies and any(spec.kind != "mla" for spec in layers.values()):
        raise LayoutError(
            "the model has fewer KV heads than ranks, which pdstore does not support: use a smaller"
            " tensor-parallel size"
        )
    return layers


def _shaping(vllm_config: Any, names: Sequence[str]) -> str:
    """Returns the configuration that changes KV, and the layers' order, in canonical form.

    The instance's options for processing images, sounds and videos are included, because vLLM's
    hash of such an item leaves them out. Options of a single request are in that hash already. The
    option `device` is left out: it does not change the KV.
    """
    model = vllm_config.model_config
    fields = {name: getattr(model.hf_text_config, name, None) for name in SHAPING}
    options = getattr(model, "multimodal_config", None)
    given = dict(getattr(options, "mm_processor_kwargs", None) or {})
    given.pop("device", None)
    more: dict[str, Json] = {"mm_processor_kwargs": given} if given else {}
    return shaping(fields, max_model_len=model.max_model_len, layers=list(names), **more)


def _layer_spec(name: str, spec: Any, cache: torch.Tensor, tp_size: int, table: int) -> LayerSpec:
    """Returns a layer's shape. Raises LayoutError if its blocks hold anything but causal KV."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode not in ("NONE", "FP8_PER_TENSOR"):
        raise LayoutError(
            f"layer {name} keeps scales apart from the tokens of a block ({mode}), which pdstore"
            " does not support"
        )
    _refuse_sparse_attention(name, spec)
    if getattr(spec, "non_causal", False):
        raise LayoutError(f"layer {name} is not causal: its KV depends on later tokens")
    heads, channels = cache.shape[2:]
    if type(spec) is MLAAttentionSpec:
        return LayerSpec(1, channels, value_dim=0, kind="mla", table=table)
    head_dim = min(spec.head_size, channels) if hasattr(spec, "head_size") else channels
    full = LayerSpec(heads * tp_size, head_dim, value_dim=channels - head_dim, table=table)
    if type(spec) is SlidingWindowSpec:
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return replace(full, kind="sliding", window=window)
    if type(spec) is FullAttentionSpec:
        return full
    raise LayoutError(
        f"layer {name} keeps its state as {type(spec).__name__}; pdstore supports full attention,"
        " sliding windows and MLA"
    )


def _is_old_indexer(spec: Any) -> bool:
    """Returns True for an indexer's cache as vLLM 0.26 describes it.

    There an indexer is an MLA layer of bytes that names neither a cache dtype nor a quantization.
    An MLA layer with fp8 names both. Later versions of vLLM name an indexer's role.
    """
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    is_bytes = getattr(spec, "dtype", None) is torch.uint8 and mode == "NONE"
    is_unnamed = getattr(spec, "cache_dtype_str", None) is None
    return isinstance(spec, MLAAttentionSpec) and is_bytes and is_unnamed


def _refuse_sparse_attention(name: str, spec: Any) -> None:
    """Raises LayoutError for caches of sparse attention whose rows cannot be cut by token."""
    role = getattr(getattr(spec, "cache_role", None), "value", "sparse")
    if role != "sparse" or "indexer" in name.split(".") or _is_old_indexer(spec):
        raise LayoutError(
            f"layer {name} is an indexer of sparse attention (DeepSeek V3.2, GLM-5): each of its"
            " blocks ends with the scales of all its tokens, so a prompt's tail would lose them;"
            " pdstore does not support such models"
        )
    tokens_per_row = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    version = getattr(spec, "model_version", None)
    if tokens_per_row not in (1, -1) or version is not None:  # -1: a state, no attention
        raise LayoutError(
            f"layer {name} keeps compressed attention ({tokens_per_row} tokens in a row,"
            f" {version}): a row does not belong to one token, so pdstore does not support it"
        )


def _page(vllm_config: Any, layer: str) -> str:
    """Returns the page format of vLLM's CPU backend, named by its kernels' instruction set."""
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    isa = getattr(module, "isa", None)
    if isa is None:
        backend = getattr(module, "attn_backend", None)
        isa = backend.get_name() if backend is not None else "plain"
    return f"vllm-cpu:{isa}"


def keys_of(request: Any, cache: PrefixCacheManager, content: Content) -> PromptKeys | None:
    """Returns the keys of a request's prompt. They cover all that the prompt's KV depends on.

    Returns None if the request must bypass the pool, because its KV depends on something that keys
    do not contain, or because its KV must not be shared. A request bypasses the pool, for example,
    if its LoRA adapter was loaded in place of another adapter.

    content: the digests of the request's items and of its LoRA adapter.
    """
    lora = request.lora_request
    # vLLM's CPU backend packs a block as a page. A prompt's last page may still hold KV of an
    # earlier request after the prompt's end, so a request with a salt must not share pages.
    has_pages = cache.namespace.fields["page"] is not None
    if (
        not content.may_share
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.pooling_params is not None
        or getattr(request, "resumable", False)
        or getattr(lora, "load_inplace", False)
        or (has_pages and request.cache_salt)
    ):
        return None
    return cache.keys(
        request.prompt_token_ids,
        lora=content.lora,
        cache_salt=(request.cache_salt or "").encode(),
        items=content.items,
    )
