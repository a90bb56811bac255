"""Turns vLLM's configuration, KV cache and requests into settings, layouts, revisions and keys."""

# Decision: docs/decisions/033-vllm-namespace.md
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from pdstore.adapters.vllm.contents import Content
from pdstore.adapters.vllm.layers import (
    SEE,
    Layers,
    all_layers,
    own_layers,
    page_of,
    refuse_layers_without_tensors,
    refuse_states,
    views_of,
)
from pdstore.adapters.vllm.tables import FAILS_WHOLE_LOADS, StateTables
from pdstore.errors import ConfigError
from pdstore.format.handoff import TransferParams
from pdstore.format.keys import INDEXING, SHAPING, Json, PromptKeys, canonical, shaping
from pdstore.format.layout import Layout
from pdstore.format.weights import weights_revision
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import Settings, read_settings

log = logging.getLogger("vllm.pdstore")

_LAST_TOKEN_DECIDED = "_p_side_truncated"
"""The parameter by which vLLM's connectors (NIXL, Mooncake) tell that a prompt is cut already."""


_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def settings_of(vllm_config: Any) -> Settings:
    """Returns the settings; `kv_connector_extra_config` wins over the environment.

    Raises ConfigError.
    """
    transfer = vllm_config.kv_transfer_config
    given = dict(transfer.kv_connector_extra_config)
    if transfer.kv_role in _ROLES:
        given.setdefault("role", _ROLES[transfer.kv_role])
    return read_settings(**given)


def publishes_events(vllm_config: Any) -> bool:
    """Returns whether vLLM publishes events of its KV cache."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(events and events.enable_kv_cache_events and events.publisher != "null")


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
    if not FAILS_WHOLE_LOADS and (len(groups) > 1 or has_windows):
        raise ConfigError(
            "pdstore does not support several KV groups or sliding windows with this old vLLM,"
            " which does not announce the blocks it gives back, and cannot be told that a load"
            f" failed as a whole: use vLLM 0.30 or newer; {SEE}"
        )
    refuse_states(vllm_config, kv_cache_config)
    refuse_layers_without_tensors(kv_cache_config)
    refusals = {
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
      them, in the layout's order: see `views_of`.
    All stages of a pipeline must call it at the same time, to send each other their layers.
    Raises LayoutError for layers or sharding that are not supported.
    """
    views: dict[str, torch.Tensor] = {}

    def own() -> Layers:
        views.update(views_of(kv_cache_config, kv_caches))
        return own_layers(vllm_config, kv_cache_config, views)

    layers, pipeline = all_layers(own)
    views = {name: views[name] for name in layers if name in views}
    states = StateTables.of(kv_cache_config)
    own_name, first = next((n, view) for n, view in views.items() if layers[n].form is None)
    has_items = getattr(vllm_config.model_config, "multimodal_config", None) is not None
    weights = vllm_config.model_config.quantization
    cache_dtype = vllm_config.cache_config.cache_dtype
    is_plain = weights is None and cache_dtype == "auto"
    layout = Layout.of(
        settings,
        dtype=str(first.dtype).removeprefix("torch."),
        layers=list(layers.values()),
        engine_block_tokens=first.shape[1],
        boundary_tokens=_boundary(layers, states, first.shape[1]),
        freed_tokens=first.shape[0] // kv_cache_config.num_blocks * first.shape[1],
        rope=_shaping(vllm_config, [name for name, of in layers.items() if not of.optional]),
        quantization=None if is_plain else canonical([weights, str(cache_dtype)]),
        page=page_of(vllm_config, own_name) if first.device.type == "cpu" else None,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        pipeline=pipeline,
        items="name, sha256" if has_items else None,
        speculation=states.num_drafts,
        draft=_draft(settings, vllm_config, [n for n, of in layers.items() if of.optional]),
    )
    return layout, views


def _boundary(layers: Layers, states: StateTables, block_tokens: int) -> int | None:
    """Returns the tokens between two ends where vLLM gives blocks back or keeps states, if any."""
    if states.keeps_ends:
        return states.entry_tokens
    return block_tokens if any(spec.window for spec in layers.values()) else None


def layers_by_step(vllm_config: Any, layout: Layout, names: Sequence[str]) -> Sequence[str]:
    """Returns the layers whose KV can be saved during a step: those computed once in it.

    vLLM computes a draft model's layers once for each drafted token, so they are left out: their KV
    is complete only at the end of the step. If a step has microbatches, vLLM computes each layer
    once for each of them, so no layer is returned.

    names: those of the layers in this rank's cache, in the layout's order.
    """
    parallel = vllm_config.parallel_config
    splits = getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False)
    if splits:
        return ()
    every = layout.identity.layers
    kept = zip(names, layout.held_layers, strict=True)
    return [name for name, number in kept if not every[number].optional]


def longest_drafted(vllm_config: Any) -> int | None:
    """Returns how many tokens the longest sequence of a step may have for a draft model to run.

    None if it runs in every step, or if there is none. The first of vLLM's two model runners skips
    it for all of a step if one sequence is longer than the draft model takes, with the tokens that
    are to be drafted. Where vLLM drafts no tokens for other reasons, the draft model still runs.
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or getattr(vllm_config, "use_v2_model_runner", False):
        return None
    longest: int = draft.max_model_len or vllm_config.model_config.max_model_len
    num_drafted: int = speculative.num_speculative_tokens + 1  # 1 more in DFlash
    return longest - num_drafted


def revision_of(settings: Settings, vllm_config: Any) -> str:
    """Returns the revision of the model's weights, without a draft model's.

    Raises ConfigError if no revision is found and the user must set it.
    """
    return _revision(settings, vllm_config.model_config, vllm_config.load_config.load_format)


def _draft(settings: Settings, vllm_config: Any, names: Sequence[str]) -> str:
    """Returns what the draft model is, in canonical form; empty if no layer is a draft's.

    It has the revision of its weights, unless they are in the model's own checkpoint or
    PDSTORE_WEIGHTS names both. Raises ConfigError as `revision_of` does.
    """
    if not names:
        return ""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    draft = speculative.draft_model_config
    revision = None
    if not settings.weights and draft.model != model.model:
        revision = _revision(settings, draft, vllm_config.load_config.load_format)
    fields = {name: getattr(draft.hf_text_config, name, None) for name in (*SHAPING, *INDEXING)}
    more: dict[str, Json] = {"method": speculative.method, "quantization": draft.quantization}
    length = draft.max_model_len
    return shaping(fields, max_model_len=length, layers=list(names), revision=revision, **more)


def _revision(settings: Settings, model: Any, load_format: str) -> str:
    if not settings.weights and load_format == "dummy":
        raise ConfigError("weights of load format dummy have no revision: set PDSTORE_WEIGHTS")
    commit = getattr(model.hf_config, "_commit_hash", None)
    is_weights = getattr(model, "hf_config_path", None) in (None, model.model)
    if not settings.weights and commit and is_weights and not Path(model.model).is_dir():
        variant = model.model.partition(":")[2]  # names a GGUF file of a repository
        return f"commit:{commit}:{variant}" if variant else f"commit:{commit}"
    return weights_revision(model.model, settings)


def _shaping(vllm_config: Any, names: Sequence[str]) -> str:
    """Returns the configuration that changes KV, and the layers' order, in canonical form.

    The instance's options for processing images, sounds and videos are included, because vLLM's
    hash of such an item leaves them out. Options of a single request are in that hash already. The
    option `device` is left out: it does not change the KV.
    """
    model = vllm_config.model_config
    fields = {name: getattr(model.hf_text_config, name, None) for name in (*SHAPING, *INDEXING)}
    options = getattr(model, "multimodal_config", None)
    given = dict(getattr(options, "mm_processor_kwargs", None) or {})
    given.pop("device", None)
    more: dict[str, Json] = {"mm_processor_kwargs": given} if given else {}
    return shaping(fields, max_model_len=model.max_model_len, layers=list(names), **more)


def keys_of(request: Any, cache: PrefixCacheManager, content: Content) -> PromptKeys | None:
    """Returns the keys of a request's prompt. They cover all that the prompt's KV depends on.

    Returns None if the request must bypass the pool, because its KV depends on something that keys
    do not contain, or because its KV must not be shared. A request bypasses the pool, for example,
    if its LoRA adapter was loaded in place of another adapter.

    content: the digests of the request's items and of its LoRA adapter.
    """
    if not content.may_share or why_bypassing(request, cache):
        return None
    return cache.keys(
        request.prompt_token_ids,
        lora=content.lora,
        cache_salt=(request.cache_salt or "").encode(),
        items=content.items,
    )


def why_bypassing(request: Any, cache: PrefixCacheManager) -> str:
    """Returns why keys of a request's tokens cannot name its KV; "" if they can.

    They can if only the contents of its images, sounds, videos or LoRA adapter are at fault.
    """
    # A prompt's last page may still hold KV of an earlier request after the prompt's end, so a
    # request with a salt must not share pages. vLLM's CPU backend packs each block as a page.
    at_fault = {
        "it has embeddings in place of tokens": (
            request.prompt_token_ids is None or request.prompt_embeds is not None
        ),
        "it is for a pooling model": request.pooling_params is not None,
        "its prompt comes in parts": getattr(request, "resumable", False),
        "its LoRA adapter is loaded in place": getattr(request.lora_request, "load_inplace", False),
        "it has a cache_salt, which this instance's KV cache cannot keep apart": (
            cache.namespace.has_pages and request.cache_salt
        ),
    }
    return next((why for why, is_so in at_fault.items() if is_so), "")


def drops_last_token(request: Any, cache: PrefixCacheManager) -> bool:
    """Returns whether P computes a new request without its last token.

    It must not where the token counts for more than its state: if no hand-off is asked for, so
    that P's answer is what the user reads, if the log probabilities of the prompt are asked for,
    or if an image ends with it.
    """
    if not cache.namespace.continuation.is_exact:
        return False
    asked = params_of(request)
    if not (asked.asks_prefill or asked.handoff is not None) or not cache.is_prefill(asked):
        return False
    if asked.keeps_last_token:
        keep_last_token(request)
    return not has_last_token_decided(request) and can_drop_last_token(request, cache)


def can_drop_last_token(request: Any, cache: PrefixCacheManager) -> bool:
    """Returns whether a request without its last token is a prompt that P can compute for D.

    It is not if the request bypasses the pool, if its prompt's log probabilities are asked for, or
    if an image, sound or video ends with that token.
    """
    num_tokens = request.num_prompt_tokens
    places = (item.mm_position for item in request.mm_features)
    ends_in_item = any(place.offset + place.length >= num_tokens for place in places)
    is_needed = num_tokens < 2 or ends_in_item or request.skip_reading_prefix_cache
    return not (is_needed or why_bypassing(request, cache))


def drop_last_token(request: Any) -> None:
    """Makes a request that has just come in one without its last token, for one token's answer.

    vLLM's front end in this process may count the tokens of the old list, so it stays as it is.
    """
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    keep_last_token(request)


def keep_last_token(request: Any) -> None:
    """Makes all connectors of a MultiConnector leave a request's last token alone from now on."""
    request.kv_transfer_params[_LAST_TOKEN_DECIDED] = True


def has_last_token_decided(request: Any) -> bool:
    """Returns whether this connector or another has dropped the last token, or is to keep it."""
    return bool(request.kv_transfer_params.get(_LAST_TOKEN_DECIDED))


def params_of(request: Any) -> TransferParams:
    """Parses `kv_transfer_params`; a malformed hand-off in them counts as none, with a warning."""
    try:
        return TransferParams.parse(request.kv_transfer_params)
    except ValueError as error:
        log.warning("request %s is served without a hand-off: %s", request.request_id, error)
        return TransferParams()
