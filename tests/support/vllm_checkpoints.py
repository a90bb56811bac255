"""Tiny random checkpoints for tests with vLLM: every kind of KV cache that the adapter knows.

The weights are random but not flat: greedy answers have real margins, and a wrong KV byte shows in
the logprobs. Any list of numbers below VOCABULARY is a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
)

END = "<|end|>"
VOCABULARY = 257  # the bytes, and END
MAX_TOKENS = 4096
SLIDING_WINDOW = 64
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
    # With the usual 0.02 a model this small answers with nearly equal logits.
    "initializer_range": 0.2,
}


def llama_config(**changes: Any) -> LlamaConfig:
    """Returns the shape of the tiny Llama, with these changes."""
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32, **_COMMON}
    return LlamaConfig(**shape | changes)


def _qwen3() -> PretrainedConfig:
    return Qwen3Config(num_hidden_layers=3, num_key_value_heads=2, head_dim=32, **_COMMON)


def _gemma3() -> PretrainedConfig:
    """Returns four layers that see SLIDING_WINDOW tokens, and two that see all."""
    return Gemma3TextConfig(
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **_COMMON,
    )


_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 2,  # in no layer
    # DeepSeek's own values. With plain rotary embedding vLLM's CPU backend gives other answers
    # than transformers does, and others again when a prompt stands twice in a batch.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": MAX_TOKENS // 2,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    **_COMMON,
}
"""The latent of vLLM's CPU kernel: 512 + 64."""


def _mla() -> PretrainedConfig:
    """Returns DeepSeek-V2 without experts."""
    return DeepseekV2Config(num_hidden_layers=2, first_k_dense_replace=2, **_MLA)


def _mtp() -> PretrainedConfig:
    """Returns DeepSeek-V3 without experts: one layer, and one for multi-token prediction (MTP)."""
    return DeepseekV3Config(
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        **_MLA,
    )


def _gpt_oss() -> PretrainedConfig:
    """Returns windows beside full attention, with sinks and experts."""
    return GptOssConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **_COMMON | {"intermediate_size": 64},
    )


def _qwen3_next() -> PretrainedConfig:
    """Returns three layers of gated delta nets before one of full attention.

    vLLM makes a block of attention as large as a state: of these heads it has 128 tokens.
    """
    return Qwen3NextConfig(
        num_hidden_layers=4,
        num_key_value_heads=4,
        head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,  # the CPU's kernel takes no shorter heads
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        **_COMMON,
    )


def _granite() -> PretrainedConfig:
    """Returns Granite 4 without experts: three layers of Mamba2 before one of attention."""
    return GraniteMoeHybridConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        layer_types=["mamba"] * 3 + ["attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=0.17,
        **_COMMON,
    )


def _nemotron_h() -> PretrainedConfig:
    """Returns two layers of Mamba2 and one of attention, with one between them without KV."""
    return NemotronHConfig(
        layers_block_type=["mamba", "mlp", "mamba", "attention"],
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=1,
        conv_kernel=4,
        chunk_size=128,
        **_COMMON,
    )


def _lfm2() -> PretrainedConfig:
    """Returns three layers of short convolutions before one of full attention."""
    return Lfm2Config(
        num_hidden_layers=4,
        num_key_value_heads=2,
        layer_types=["conv"] * 3 + ["full_attention"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        conv_dim=128,  # of these two vLLM knows no default
        block_dim=128,
        **_COMMON,
    )


_Kinds: TypeAlias = dict[str, Callable[[], PretrainedConfig]]

KINDS: _Kinds = {
    "llama": llama_config,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "mla": _mla,
    "qwen3_next": _qwen3_next,
    "granite": _granite,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
}
"""One of each family."""
_VARIANTS: _Kinds = {
    "llama_one_head": partial(llama_config, num_key_value_heads=1),
    "llama_one_layer": partial(llama_config, num_hidden_layers=1),
    "mtp": _mtp,  # its last layer is left out: tests.support.vllm_draft adds it
}


def make_tiny(kind: str, directory: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of a kind; another seed is other weights of the same shape."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config((KINDS | _VARIANTS)[kind](), dtype=torch.float32)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte, END, and a template that adds nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, END])}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, chat_template=_TEMPLATE)
