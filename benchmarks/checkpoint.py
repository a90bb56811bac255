"""A checkpoint of random weights in a given shape, with a tokenizer that is never used."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class Shape(NamedTuple):
    """A Llama with heads of 128, four to a KV head; `hidden` 4096 and 32 layers are an 8B model."""

    vocabulary: int
    layers: int
    hidden: int
    positions: int


def make_model(shape: Shape, directory: Path, device: str, dtype: str = "bfloat16") -> None:
    """Writes the checkpoint. Its weights are drawn on `device`."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 7 // 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 128),
        num_key_value_heads=max(1, shape.hidden // 512),
        head_dim=128,
        max_position_embeddings=shape.positions,
        dtype=getattr(torch, dtype),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            LlamaForCausalLM(config).save_pretrained(directory)
    finally:
        torch.set_default_dtype(before)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer of one word, for engines that want to have one."""
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")
    tokenizer.save_pretrained(directory)
