"""Tiny random checkpoints for tests with vLLM: every kind of KV cache that the adapter knows.

The weights are random but not flat: greedy answers have real margins, and a wrong KV byte shows in
the logprobs. Any list of numbers below VOCABULARY is a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
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


def _mla() -> PretrainedConfig:
    """Returns DeepSeek-V2 without experts, with the latent of vLLM's CPU kernel: 512 + 64."""
    return DeepseekV2Config(
        num_hidden_layers=2,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        head_dim=64,
        first_k_dense_replace=2,
        n_routed_experts=2,  # in no layer
        # DeepSeek's own values. With plain rotary embedding vLLM's CPU backend gives other answers
        # than transformers does, and others again when a prompt stands twice in a batch.
        rope_parameters={
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
    )


KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama_config,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "mla": _mla,
}


def make_tiny(kind: str, directory: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of a kind; another seed is other weights of the same shape."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
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
