"""Layers with states, as vLLM describes them: their layout, their order, and which are refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdstore.adapters.vllm.describe import layout_of, refuse_unsupported
from pdstore.adapters.vllm.layers import joined
from pdstore.adapters.vllm.messages import RankLayout
from pdstore.adapters.vllm.tables import StateTables
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.identity import LayerSpec
from tests.support.kv import settings_of
from tests.support.states import NO_WINDOW, StateInstance

STATE = MambaSpec(
    block_size=128,
    shapes=((3, 8), (2, 4, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=512,
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    mamba_cache_mode="align",
)
NUM_BYTES = 3 * 8 * 2 + 2 * 4 * 4 * 4
FULL = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
NAMES = [f"model.layers.{n}.{'self_attn.attn' if n % 4 == 3 else 'linear_attn'}" for n in range(8)]
GROUPS = [
    KVCacheGroupSpec([NAMES[0], NAMES[4]], STATE),
    KVCacheGroupSpec([NAMES[1], NAMES[5]], STATE),
    KVCacheGroupSpec([NAMES[2], NAMES[6]], STATE),
    KVCacheGroupSpec([NAMES[3], NAMES[7]], FULL),
]
"""The KV groups of Qwen3-Next: those of states come first."""


def cache_of(spec, kernel_tokens=None):
    """A layer's tensor as vLLM registers it: of a state, the first bytes of each padded page."""
    if isinstance(spec, MambaSpec):
        pages = torch.zeros(4, spec.page_size_bytes, dtype=torch.int8)
        return pages[:, None, None, : spec.state_content_size_bytes]
    tokens = kernel_tokens or spec.block_size
    num_rows = 4 * spec.block_size // tokens
    rows = torch.zeros(num_rows, 1, tokens, 2 * spec.head_size, dtype=spec.dtype)
    return rows.to("meta")  # a GPU's, which packs no pages


@pytest.fixture
def describe(monkeypatch):
    """Describes a rank: `describe(GROUPS)` gives its layout and the tensors for the pool."""
    one = SimpleNamespace(world_size=1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: one)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)

    def make(groups, tp_size=1, backend=None, kernel_tokens=None, drafts=False):
        specs = {
            name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            for group in groups
            for name in group.layer_names
        }
        named = SimpleNamespace(get_name=lambda: backend)
        modules = {name: SimpleNamespace(get_attn_backend=lambda: named) for name in specs}
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=8),
            max_model_len=512,
            quantization=None,
            model="one with its drafts",
        )
        speculative = SimpleNamespace(method="mtp", draft_model_config=model)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
            compilation_config=SimpleNamespace(static_forward_context=modules if backend else {}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=model,
            speculative_config=speculative if drafts else None,
        )
        caches = {name: cache_of(spec, kernel_tokens) for name, spec in specs.items()}
        kv_cache_config = KVCacheConfig(4, [], groups)
        return layout_of(settings_of(), config, kv_cache_config, caches)

    return make


def namespace_of(layout):
    return layout.namespace(settings_of(), weights="w")


def test_layers_stand_in_the_models_order_beside_their_states(describe):
    layout, views = describe(GROUPS, kernel_tokens=16)
    assert list(views) == NAMES
    assert [spec.table for spec in layout.identity.layers] == [0, 1, 2, 3] * 2
    assert layout.geometry.tables == (None, None, None, 16)
    assert layout.block_tokens == 128, "vLLM keeps states at the ends of its own blocks"
    assert not layout.identity.drafts, "a layer may have two caches"
    assert layout.identity.dtype == "bfloat16"
    state = views[NAMES[0]]
    assert (state.dtype, tuple(state.shape)) == (torch.uint8, (4, 1, 1, NUM_BYTES))
    assert state.stride(0) == 512, "a view of vLLM's padded pages"
    assert namespace_of(layout).states == {0, 1, 2}


def test_a_state_is_of_one_rank_unless_each_rank_has_all_of_it(describe):
    layout, _ = describe(GROUPS, tp_size=2)
    assert layout.identity.layers[0].num_kv_heads == 2
    replicated = replace(STATE, tp_replicated=True)
    layout, _ = describe([KVCacheGroupSpec([NAMES[0]], replicated), GROUPS[3]], tp_size=2)
    assert layout.identity.layers[0].is_whole


@pytest.mark.parametrize(
    "other",
    [
        {"mamba_type": MambaAttentionBackendEnum.MAMBA2},
        {"shapes": ((8, 3), (2, 4, 4))},
        {"dtypes": (torch.float16, torch.float32)},
        {"backend": "OTHER"},
        {"order": "DS"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_states_of_equal_size_and_another_meaning_are_not_shared(describe, monkeypatch, other):
    spec = replace(STATE, **{k: v for k, v in other.items() if hasattr(STATE, k)})
    one, _ = describe(GROUPS, backend="GDN")
    if "order" in other:
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: other["order"])
    groups = [*(replace(group, kv_cache_spec=spec) for group in GROUPS[:3]), GROUPS[3]]
    two, _ = describe(groups, backend=other.get("backend", "GDN"))
    namespaces = namespace_of(one), namespace_of(two)
    assert namespaces[0].digest != namespaces[1].digest
    [told] = namespaces[0].differences(namespaces[1].described)
    assert told.startswith("form")


def test_without_prefix_caching_the_length_of_a_state_block_names_nothing(describe):
    lengths = [replace(STATE, mamba_cache_mode="none", block_size=size) for size in (512, 1024)]
    groups = [[KVCacheGroupSpec(NAMES[:1], spec), GROUPS[3]] for spec in lengths]
    layouts = [describe(each, kernel_tokens=16)[0] for each in groups]
    digests = {namespace_of(layout).digest for layout in layouts}
    assert len(digests) == 1
    assert layouts[0].block_tokens == settings_of().block_tokens


def test_tables_of_states_are_found_by_what_vllm_says_of_the_layers():
    by_layer = UniformTypeKVCacheSpecs(
        block_size=128, kv_cache_specs={NAMES[0]: STATE, NAMES[1]: replace(STATE, shapes=((2, 2),))}
    )
    groups = [GROUPS[3], KVCacheGroupSpec(NAMES[:2], by_layer)]
    found = StateTables.of(SimpleNamespace(kv_cache_groups=groups))
    assert found == StateTables(frozenset({1}), 128, keeps_ends=True)
    assert not StateTables.of(SimpleNamespace(kv_cache_groups=GROUPS[3:]))


WITHOUT_LAYERS = [KVCacheGroupSpec([], group.kv_cache_spec) for group in GROUPS]
"""What vLLM says of groups without a layer on a stage of a pipeline."""


def test_a_stage_without_states_has_the_tables_and_blocks_of_the_others(describe):
    groups = [*WITHOUT_LAYERS[:3], GROUPS[3]]
    whole = SimpleNamespace(kv_cache_groups=GROUPS)
    assert StateTables.of(SimpleNamespace(kv_cache_groups=groups)) == StateTables.of(whole)
    layout, _ = describe(groups)
    assert layout.block_tokens == describe(GROUPS)[0].block_tokens == 128


def test_a_stage_without_a_layer_of_a_group_of_unlike_states_has_its_table():
    unlike = {NAMES[0]: STATE, NAMES[1]: replace(STATE, shapes=((2, 2),))}
    by_layer = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=unlike)
    groups = [KVCacheGroupSpec([], by_layer), GROUPS[3]]
    found = StateTables.of(SimpleNamespace(kv_cache_groups=groups))
    assert found == StateTables(frozenset({0}), 128, keeps_ends=True)
    refused(groups)
    with pytest.raises(ConfigError, match="as all of the model's layers do"):
        refused([GROUPS[0], *groups[:1]])


def drafting(groups, num_tokens):
    """KV groups of an engine that drafts so many tokens: the conv states have a row more for each.

    vLLM's own function gives the shapes.
    """
    gdn = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape
    shapes = gdn(1, 1, 2, 4, 4, 4, num_spec=num_tokens)
    spec = replace(STATE, shapes=shapes, num_speculative_blocks=num_tokens)
    made = replace(FULL, block_size=128)
    return [
        replace(g, kv_cache_spec=spec if isinstance(g.kv_cache_spec, MambaSpec) else made)
        for g in groups
    ]


def test_speculation_is_told_by_name_and_is_another_form_of_states(describe):
    plain, two, three = (describe(drafting(GROUPS, n))[0] for n in (0, 2, 3))
    namespaces = [namespace_of(layout) for layout in (plain, two, three)]
    assert "speculation" not in namespaces[0].fields, "else namespaces of before would be others"
    assert namespaces[0].digest != namespaces[1].digest != namespaces[2].digest
    forms = [layout.identity.layers[0].form for layout in (plain, two, three)]
    assert len(set(forms)) == 3
    for a, b in (0, 1), (1, 2), (2, 0):
        told = namespaces[a].differences(namespaces[b].described)
        [line] = [line for line in told if line.startswith("speculation: ")]
        assert "speculation differs" in line
        assert "give both engines the same --speculative-config" in line
    assert namespaces[1].described["speculation"] == "2"


def test_a_stage_without_states_knows_of_their_speculation(describe):
    groups = drafting(GROUPS, 2)
    stage = [*(replace(group, layer_names=[]) for group in groups[:3]), groups[3]]
    assert StateTables.of(SimpleNamespace(kv_cache_groups=stage)).num_drafts == 2
    assert describe(stage)[0].identity.speculation == 2


def test_states_with_rows_for_drafts_may_bring_what_an_earlier_tenant_left_there(describe):
    plain, drafts = (namespace_of(describe(drafting(GROUPS, n))[0]) for n in (0, 2))
    assert (plain.has_pages, drafts.has_pages) == (False, True), "requests with a salt bypass it"


@pytest.mark.parametrize("name", ["mtp.layers.0.self_attn.attn", "model.layers.8.self_attn.attn"])
def test_the_draft_layers_of_a_model_with_states_are_its_last(describe, name):
    groups = [*GROUPS[:3], replace(GROUPS[3], layer_names=[name, *GROUPS[3].layer_names])]
    layout, views = describe(groups, drafts=True)
    assert list(views) == [*NAMES, name]
    assert [spec.optional for spec in layout.identity.layers] == [False] * len(NAMES) + [True]
    plain, _ = describe(GROUPS)
    assert namespace_of(plain).digest == namespace_of(layout).digest


def test_a_stage_of_states_alone_is_refused_by_name(describe):
    groups = [*GROUPS[:3], WITHOUT_LAYERS[3]]
    refused(groups)  # the model has other layers
    with pytest.raises(LayoutError, match="only layers with states or pages; choose a smaller"):
        describe(groups)


WINDOW = SlidingWindowSpec(
    block_size=128, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=200
)
WITH_WINDOW = [*GROUPS, KVCacheGroupSpec(["model.layers.8.self_attn.attn"], WINDOW)]


def test_windows_beside_states_give_back_whole_blocks_of_vllms_of_several_of_a_kernel(describe):
    layout, _ = describe(WITH_WINDOW, kernel_tokens=16)
    assert (layout.block_tokens, layout.geometry.tables[4]) == (128, 16)
    tables = [{256: 1}] * 3 + [range(16), [NO_BLOCK] * 8 + [*range(8)]]
    layout.continuation.check_gaps(tables)
    assert layout.continuation.usable_end(tables, 256, 0) == 0, "the window begins in block 0"
    longer = [{384: 1}] * 3 + [range(24), [NO_BLOCK] * 8 + [*range(16)]]
    assert layout.continuation.usable_end(longer, 384, 0) == 384


def test_groups_with_blocks_of_unlike_numbers_of_kernel_blocks_are_refused(describe):
    wide = KVCacheGroupSpec([NAMES[3]], replace(FULL, block_size=256))
    with pytest.raises(LayoutError, match=r"different block sizes, \[64\] tokens in \[8, 16\]"):
        describe([wide, WITH_WINDOW[-1]], kernel_tokens=64)


def refused(groups, **changes):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(use_replayssm=bool(changes)),
        **changes,
    )
    refuse_unsupported(config, SimpleNamespace(kv_cache_groups=groups))


OTHER_SIZE = KVCacheGroupSpec([NAMES[4]], replace(STATE, block_size=256))
EVERY = KVCacheGroupSpec([NAMES[0]], replace(STATE, mamba_cache_mode="all"))


@pytest.mark.parametrize(
    ("groups", "changes", "reason"),
    [
        (GROUPS, {"speculative_config": object()}, r"layers\.0\..* group 0 .*--use-replayssm"),
        (GROUPS[:1], {}, r"layers\.0\..* KV group 0 .*needs a layer with KV of each token"),
        ([*GROUPS, OTHER_SIZE], {}, r"layers\.4\..* KV group 4 .* 256 tokens .* 128"),
        ([EVERY, GROUPS[3]], {}, r"layers\.0\..* KV group 0 .*mode all"),
    ],
    ids=["replays", "states alone", "two sizes", "mode all"],
)
def test_states_that_cannot_be_handed_over_are_refused_by_name(groups, changes, reason):
    refused(GROUPS)
    with pytest.raises(ConfigError, match=reason) as error:
        refused(groups, **changes)
    assert "docs/models.md" in str(error.value)


def test_vllm_0_30_is_the_first_that_serves_them():
    is_old = tuple(map(int, version("vllm").split(".")[:2])) < (0, 30)
    refusal = pytest.raises(ConfigError, match=r"use vLLM 0\.30 or newer; docs/models\.md")
    with refusal if is_old else contextlib.nullcontext():
        refused(GROUPS)


def test_ranks_that_keep_states_elsewhere_are_refused(store, closed_after):
    instance = closed_after(StateInstance(store))
    ranks = [
        RankLayout(instance.namespace, 64, StateTables(frozenset(numbers), 64, keeps_ends=True))
        for numbers in ({0, 1}, {0})
    ]
    assert RankLayout.common(ranks[:1]) == ranks[0]
    with pytest.raises(ConfigError, match="states in unlike block tables"):
        RankLayout.common(ranks)


def test_stages_are_joined_in_the_models_order():
    state, full = NO_WINDOW[0], LayerSpec(2, 8, table=2)
    stages = [
        {"model.layers.1.attn": full, "model.layers.0.mamba": state},
        {"model.layers.2.mamba": state, "model.layers.10.attn": full, "model.layers.2.attn": full},
    ]
    layers, pipeline = joined(stages, 0)
    assert list(layers) == [
        "model.layers.0.mamba",
        "model.layers.1.attn",
        "model.layers.2.attn",
        "model.layers.2.mamba",  # counts as computed when a later layer of tokens is reported
        "model.layers.10.attn",
    ]
    assert pipeline.stage_of == (0, 0, 1, 1, 1)
