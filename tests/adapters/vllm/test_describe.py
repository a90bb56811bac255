"""describe: which setting wins, which configurations are refused, and what a key covers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig, MultiModalConfig
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from pdstore.adapters.vllm import describe
from pdstore.adapters.vllm.contents import PLAIN
from pdstore.adapters.vllm.describe import (
    hashes_items,
    keys_of,
    layers_by_step,
    layout_of,
    longest_drafted,
    refuse_unsupported,
    revision_of,
    settings_of,
    tells_paths_apart,
    why_bypassing,
)
from pdstore.errors import ConfigError, LayoutError
from tests.adapters.vllm.standins import GROUP, vllm_request
from tests.support.instances import instance as instance


def config_of(kv_role="kv_both", **extra):
    transfer = KVTransferConfig(
        kv_connector="PDStoreConnector", kv_role=kv_role, kv_connector_extra_config=extra
    )
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PDSTORE_STORE", "file:///environment")
    monkeypatch.setenv("PDSTORE_WORKERS", "7")
    monkeypatch.delenv("PDSTORE_ROLE", raising=False)


def test_the_role_is_the_kv_role_or_the_environments_where_vllm_says_both(monkeypatch):
    roles = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
    assert {kv_role: settings_of(config_of(kv_role)).role for kv_role in roles} == roles
    monkeypatch.setenv("PDSTORE_ROLE", "decode")
    assert settings_of(config_of()).role == "decode"
    assert settings_of(config_of("kv_producer")).role == "prefill"
    assert settings_of(config_of("kv_producer", role="both")).role == "both"


def vllm_config(enable_sleep_mode=False, calculate_kv_scales=False, **parallel):
    sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(enable_sleep_mode=enable_sleep_mode),
        cache_config=SimpleNamespace(calculate_kv_scales=calculate_kv_scales),
    )


KV_CACHE = SimpleNamespace(kv_cache_groups=[GROUP])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode_context_parallel_size": 2}, "decode context"),
        ({"prefill_context_parallel_size": 2}, "prefill context"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"calculate_kv_scales": True}, "at run time"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(changes, reason):
    refuse_unsupported(vllm_config(), KV_CACHE)
    with pytest.raises(ConfigError, match=reason):
        refuse_unsupported(vllm_config(**changes), KV_CACHE)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_vllm_that_cannot_be_told_of_a_failed_load_serves_one_kv_group(monkeypatch, num_groups):
    monkeypatch.setattr(describe, "FAILS_WHOLE_LOADS", False)
    groups = SimpleNamespace(kv_cache_groups=[GROUP] * num_groups)
    if num_groups == 1:
        refuse_unsupported(vllm_config(), groups)
        return
    with pytest.raises(ConfigError, match=r"several KV groups.*vLLM 0\.30.*docs/models\.md"):
        refuse_unsupported(vllm_config(), groups)


@pytest.mark.misconfiguration("a model without a KV cache, as encoders are")
def test_a_model_without_a_kv_cache_is_refused_with_the_switch_to_turn_off():
    with pytest.raises(ConfigError, match=r"no KV cache.*PD_TRANSFER_VIA_STORAGE=0"):
        refuse_unsupported(vllm_config(), SimpleNamespace(kv_cache_groups=[]))


NAMES = ["layer.0", "layer.1"]


@pytest.mark.parametrize(
    ("parallel", "draft_layers", "expected"),
    [
        ({}, 0, NAMES),
        ({"use_ubatching": True}, 0, []),
        ({"enable_dbo": True}, 0, []),
        ({}, 1, NAMES[:1]),
    ],
)
def test_a_layer_that_is_computed_several_times_in_a_step_is_saved_at_its_end(
    parallel, draft_layers, expected
):
    specs = [SimpleNamespace(optional=n >= 2 - draft_layers) for n in range(2)]
    layout = SimpleNamespace(identity=SimpleNamespace(layers=specs), held_layers=(0, 1))
    assert list(layers_by_step(vllm_config(**parallel), layout, NAMES)) == expected


COMMIT = "c" * 40


def hub_revision(load_format="auto", **model):
    given = {"model": "org/name", "hf_config": SimpleNamespace(_commit_hash=COMMIT), **model}
    return revision_of(
        settings_of(config_of()),
        SimpleNamespace(
            model_config=SimpleNamespace(**given),
            load_config=SimpleNamespace(load_format=load_format),
        ),
    )


def test_the_hubs_commit_is_the_revision_with_the_name_of_one_of_several_weights():
    assert hub_revision() == hub_revision(hf_config_path="org/name") == f"commit:{COMMIT}"
    names = ("org/name", "org/name:Q4_K_M", "org/name:Q8_0")
    assert len({hub_revision(model=name) for name in names}) == 3


@pytest.fixture
def described(described_groups):
    """Describes one rank's layers: `described(MLAAttentionSpec, tp_size=2)`."""

    def describe(kind, tp_size=1, tp_rank=0, spec=None, names=NAMES, **model):
        shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 8}
        spec = kind(**{**shape, "dtype": torch.float32, **(spec or {})})
        groups = [KVCacheGroupSpec(names, spec)]
        pages = (4, 1, 16, spec.head_size + getattr(spec, "head_size_v", 0))
        tensors = {name: torch.empty(pages, dtype=spec.dtype, device="meta") for name in names}
        return described_groups(groups, tensors, tp_size, tp_rank, **model)[0]

    return describe


@pytest.fixture
def described_groups(monkeypatch):
    """Describes one rank's KV groups, whose layers have these tensors."""

    def describe(groups, tensors, tp_size=1, tp_rank=0, **model):
        caches = KVCacheConfig(4, [], groups)
        caches.kv_tp_replicas = tp_size  # vLLM says so of MLA, whose ranks hold the same
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
            compilation_config=SimpleNamespace(static_forward_context={}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=SimpleNamespace(
                **{"hf_text_config": None, "max_model_len": 512, "quantization": None, **model}
            ),
        )
        one = SimpleNamespace(world_size=1)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: one)
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tp_rank)
        return layout_of(settings_of(config_of()), config, caches, tensors)

    return describe


def test_every_rank_holds_mlas_latent(described):
    ranks = [described(MLAAttentionSpec, tp_size=2, tp_rank=rank) for rank in range(2)]
    alone = described(MLAAttentionSpec)
    assert ranks[0].owned_parts == ranks[1].owned_parts == alone.owned_parts
    fields = [layout.namespace(settings_of(config_of()), weights="w") for layout in (*ranks, alone)]
    assert len({namespace.digest for namespace in fields}) == 1


def test_copies_of_a_head_count_as_heads_of_the_ranks_that_hold_them(described):
    ranks = [described(FullAttentionSpec, tp_size=2, tp_rank=rank) for rank in range(2)]
    assert {spec.num_kv_heads for layout in ranks for spec in layout.identity.layers} == {2}
    first, second = (set(layout.owned_parts) for layout in ranks)
    assert not first & second
    alone = described(FullAttentionSpec)
    settings = settings_of(config_of())
    digests = {layout.namespace(settings, weights="w").digest for layout in (*ranks, alone)}
    assert len(digests) == 2, "P and D of unequal TP sizes find nothing of each other"


INDEXER = "model.layers.1.self_attn.indexer.k_cache"
BYTES = {"head_size": 132, "dtype": torch.uint8}
SLIDING = {"sliding_window": 64}


@pytest.mark.parametrize(
    ("name", "kind", "spec", "reason"),
    [
        (INDEXER, MLAAttentionSpec, BYTES, "indexer .*scales"),  # as vLLM 0.26 describes it
        ("layer.1", MLAAttentionSpec, {"tokens_per_state": 4}, "4 tokens in a row"),
        ("layer.1", MLAAttentionSpec, {"model_version": "deepseek_v4"}, "deepseek_v4"),
        ("layer.1", SlidingWindowMLASpec, SLIDING, "SlidingWindowMLASpec"),
        ("layer.1", HiddenStateCacheSpec, {}, "HiddenStateCacheSpec"),
    ],
)
def test_a_cache_whose_rows_are_not_one_tokens_is_refused_by_its_name(
    described, name, kind, spec, reason
):
    with pytest.raises(LayoutError, match=f"layer {name} .*{reason}"):
        described(kind, spec=spec, names=[name])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "in parts"),
        ({"lora_request": SimpleNamespace(load_inplace=True)}, "in place"),
    ],
)
def test_what_tokens_do_not_name_has_no_keys(instance, changes, why):
    cache = instance().cache
    asked = vllm_request([1, 2], **changes)
    assert keys_of(asked, cache, PLAIN) is None
    assert why in why_bypassing(asked, cache)
    assert keys_of(vllm_request([1, 2], cache_salt="mine"), cache, PLAIN) is not None
    object.__setattr__(cache.namespace, "has_pages", True)
    assert keys_of(vllm_request([1, 2], cache_salt="mine"), cache, PLAIN) is None, (
        "a page may hold more"
    )


@pytest.mark.parametrize(
    ("prefix_caching", "options", "expected"),
    [
        (True, MultiModalConfig(mm_processor_cache_gb=0), True),
        (False, MultiModalConfig(mm_processor_cache_gb=4), True),
        (False, MultiModalConfig(mm_processor_cache_gb=0), False),
        (False, None, True),  # a model that takes text alone
    ],
)
def test_vllm_names_images_by_their_content_for_either_cache(prefix_caching, options, expected):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(multimodal_config=options),
    )
    assert hashes_items(config) is expected
    config.ec_transfer_config = object()
    is_text_alone = options is None
    assert hashes_items(config) is is_text_alone, "what encoders made comes by a client's name"


def test_only_a_model_that_takes_images_has_a_namespace_field_for_them(described):
    of_text, of_images = (
        described(FullAttentionSpec, multimodal_config=options).namespace(
            settings_of(config_of()), weights="w"
        )
        for options in (None, MultiModalConfig())
    )
    assert set(of_images.fields) - set(of_text.fields) == {"items"}


def test_this_vllm_tells_adapters_of_one_name_apart_by_their_paths():
    assert tells_paths_apart()


def test_an_indexer_as_old_vllm_describes_it_is_refused_by_name(described):
    named = {"cache_dtype_str": "fp8_ds_mla", "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    made = described(MLAAttentionSpec, spec={"dtype": torch.uint8, **named})
    assert made.identity.layers[0].is_whole
    with pytest.raises(LayoutError, match=r"is an indexer of sparse.*use vLLM 0\.30"):
        described(MLAAttentionSpec, spec={"dtype": torch.uint8})


@pytest.mark.parametrize(
    ("mode", "dtype", "data_bytes"),
    [
        (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8, 32),
        (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.float8_e4m3fn, 32),
        (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8, 16),
    ],
)
def test_a_scale_of_each_token_and_head_is_stored_with_them(
    described_groups, mode, dtype, data_bytes
):
    """vLLM puts the scale of K and that of V, four bytes each, behind the K and V of a head."""
    spec = TritonAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=16, dtype=dtype, kv_quant_mode=mode
        )
    )
    pages = (4, 2, 16, spec.state_content_size_bytes)
    tensors = {name: torch.empty(pages, dtype=dtype, device="meta") for name in NAMES}
    layout, views = described_groups([KVCacheGroupSpec(NAMES, spec)], tensors)
    [(part, whole)] = layout.geometry.parts.items()
    assert whole.cache.cell_bytes == data_bytes + 2 * 4
    assert layout.payload_bytes(part, 1) == len(NAMES) * 2 * (data_bytes + 2 * 4)
    assert not any(spec.is_state for spec in layout.identity.layers), "int8 alone is no state"
    assert {tuple(view.shape) for view in views.values()} == {(4, 16, 2, data_bytes + 8)}


def test_scales_behind_all_tokens_of_a_block_are_refused(described):
    mode = {"kv_quant_mode": KVQuantMode.NVFP4, "dtype": torch.uint8}
    with pytest.raises(LayoutError, match=r"layer layer\.0 of KV group 0 .*NVFP4.*docs/models\.md"):
        described(FullAttentionSpec, spec=mode)


@pytest.mark.parametrize("longest", [100, None])
def test_vllm_runs_no_draft_model_in_a_step_with_a_sequence_too_long_for_it(longest):
    """As vLLM's first model runner decides; None: the draft model takes what the model takes."""
    speculative = SimpleNamespace(
        num_speculative_tokens=3,
        draft_model_config=SimpleNamespace(max_model_len=longest),
        use_dflash=lambda: True,
    )
    model = SimpleNamespace(max_model_len=200)
    config = SimpleNamespace(speculative_config=speculative, model_config=model)
    runner = SimpleNamespace(
        speculative_config=speculative,
        num_spec_tokens=3,
        effective_drafter_max_model_len=longest or 200,
    )

    def runs(num_tokens):
        step = SimpleNamespace(max_seq_len=num_tokens)
        return GPUModelRunner._input_fits_in_drafter(runner, step)

    fits = [num_tokens for num_tokens in range(1, 201) if runs(num_tokens)]
    assert longest_drafted(config) == fits[-1]
    config.use_v2_model_runner = True
    assert longest_drafted(config) is None
    assert longest_drafted(vllm_config()) is None
