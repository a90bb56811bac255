"""docs/models.md says of each family of models what the code does with its layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from pdstore.adapters.vllm.layers import own_layers, views_of
from pdstore.adapters.vllm.plugin import VERSIONS
from pdstore.errors import LayoutError
from tests.adapters.vllm.conftest import HERE
from tests.docs.commands import ROOT
from tests.support.vllm_checkpoints import KINDS

ARCHITECTURES = {
    "Llama": "LlamaForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Gemma 3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "DeepSeek V3": "DeepseekV3ForCausalLM",
    "DeepSeek V3.2": "DeepseekV32ForCausalLM",
    "DeepSeek V4": "DeepseekV4ForCausalLM",
    "GLM-5": "GlmMoeDsaForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "Qwen3.5": "Qwen3_5ForConditionalGeneration",
    "Granite 4": "GraniteMoeHybridForCausalLM",
    "Nemotron-H": "NemotronHForCausalLM",
    "Kimi-Linear": "KimiLinearForCausalLM",
    "LFM2": "Lfm2ForCausalLM",
}
KINDS_OF = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Gemma 3": "gemma3",
    "gpt-oss": "gpt_oss",
    "DeepSeek V3": "mla",
    "Qwen3-Next": "qwen3_next",
    "Granite 4": "granite",
    "Nemotron-H": "nemotron_h",
    "LFM2": "lfm2",
}
"""The families that were tried on a CPU, and the checkpoints with which tests try them."""

FULL = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=64, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=64
)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
INDEXER = replace(MLA, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
STATE = MambaSpec(
    block_size=64, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
BACKENDS = MambaAttentionBackendEnum
SPECS = {
    "KV of all tokens": FULL,
    "KV of a sliding window": WINDOW,
    "MLA": MLA,
    "an indexer": INDEXER,
    "compressed rows": replace(MLA, tokens_per_state=4),
    "states (GDN)": replace(STATE, mamba_type=BACKENDS.GDN_ATTN),
    "states (Mamba2)": replace(STATE, mamba_type=BACKENDS.MAMBA2),
    # vLLM computes KDA by the backend of GDN
    "states (KDA)": replace(STATE, mamba_type=BACKENDS.GDN_ATTN),
    "states (short convolutions)": replace(STATE, mamba_type=BACKENDS.SHORT_CONV),
}
"""What a layer keeps, in the table's words and in vLLM's."""


def table():
    """Returns the page's table of families, its first one."""
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    lines = lines[next(number for number, line in enumerate(lines) if "|" in line) :]
    lines = lines[: lines.index("")]
    head, _, *others = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: SimpleNamespace(**dict(zip(head[1:], row[1:], strict=True))) for row in others}


TABLE = {family: vars(row) for family, row in table().items()}


def test_the_families_are_known_to_vllm_by_these_names():
    assert list(TABLE) == list(ARCHITECTURES)
    assert set(ARCHITECTURES.values()) <= ModelRegistry.get_supported_archs()


def describe(row):
    """Describes a model with a layer of each kind that the table names."""
    specs = {f"layer.{n}": SPECS[w] for n, w in enumerate(row["its layers keep"].split(", "))}
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    caches = {
        name: torch.zeros(2, 1, 1, spec.state_content_size_bytes, dtype=torch.int8)
        if isinstance(spec, MambaSpec)
        else torch.zeros(2, 1, 64, 2 * spec.head_size, dtype=spec.dtype)
        for name, spec in specs.items()
    }
    kernels = SimpleNamespace(get_attn_backend=partial(DeepseekV32IndexerCache.get_attn_backend, 0))
    indexers = {name: kernels for name, spec in specs.items() if spec is INDEXER}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=indexers),
    )
    kv_cache_config = KVCacheConfig(2, [], groups)
    return own_layers(config, kv_cache_config, views_of(kv_cache_config, caches))


@pytest.mark.parametrize("family", TABLE)
def test_a_family_runs_if_the_table_says_so_else_its_refusal_leads_to_the_table(family):
    row = TABLE[family]
    if row["runs"] == "yes":
        layers = describe(row)
        assert any(spec.is_state for spec in layers.values()) == ("states" in str(row))
        assert any(spec.is_page for spec in layers.values()) == ("indexer" in str(row))
        return
    assert (row["runs"], row["vLLM"], row["tried"]) == ("no", "", "")
    with pytest.raises(LayoutError, match=r"layer layer\.\d of KV group \d .*docs/models\.md"):
        describe(row)


def test_several_groups_need_a_vllm_that_can_be_told_of_a_failed_load():
    newest = ".".join(map(str, VERSIONS[1]))
    for row in TABLE.values():
        if row["runs"] == "yes":
            oldest = "0.30" if ", " in row["its layers keep"] else ".".join(map(str, VERSIONS[0]))
            assert row["vLLM"] == f"{oldest} to {newest}"


def test_what_was_tried_on_a_cpu_has_a_checkpoint_and_a_test_and_the_rest_says_so():
    names = ("test_models", "test_pd", "replaying")  # the last one for test_hybrids.py
    texts = "".join((HERE / f"{name}.py").read_text() for name in names)
    assert KINDS_OF.keys() == {family for family, row in TABLE.items() if "CPU" in row["tried"]}
    assert set(KINDS_OF.values()) == set(KINDS)
    assert not [kind for kind in KINDS if f'"{kind}"' not in texts]
    others = {row["tried"] for family, row in TABLE.items() if family not in KINDS_OF}
    assert others == {"H200", ""}
