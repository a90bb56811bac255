"""Prompts of a campaign, and the tiny checkpoint that all of its instances serve."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoint import write_tokenizer

VOCABULARY = 300
MAX_TOKENS = 4
_LONGEST = 320


def make_checkpoint(directory: Path, head_dim: int = 16) -> None:
    """Writes a random Llama whose logits are far from flat, so that a wrong KV byte shows."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Returns prompts of every length up to 20 blocks; half of them begin as an earlier one."""
    draw = random.Random(f"{seed} prompts")
    prompts: list[list[int]] = []
    for n in range(count):
        shared = draw.choice(prompts)[: draw.randrange(_LONGEST)] if n % 2 else []
        more = draw.randint(1, _LONGEST - len(shared)) if len(shared) < _LONGEST else 1
        prompts.append(shared + [draw.randrange(VOCABULARY) for _ in range(more)])
    return prompts
