"""Writes a checkpoint of random weights whose answers depend on the KV.

    python -m benchmarks.vllm_checkpoint DIRECTORY CONFIG_AS_JSON

Unlike vLLM's dummy weights they are the same however many ranks share them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_llama(directory: Path, config: dict[str, Any]) -> None:
    """Writes a Llama with the names of Hugging Face; keeps one that is there already."""
    text = json.dumps(config, indent=1)
    written = directory / "config.json"
    if written.exists() and written.read_text() == text:
        return
    directory.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {name: _weight(name, shape, draw).to(dtype).cpu() for name, shape in _shapes(config)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    written.write_text(text)


def _weight(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Draws weights whose products are as large as their inputs, with uneven attention."""
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    drawn = torch.randn(shape, generator=draw, device=draw.device)
    return drawn.mul_(scale * shape[-1] ** -0.5)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{of}_heads"] * head for of in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


if __name__ == "__main__":
    write_llama(Path(sys.argv[1]), json.loads(sys.argv[2]))
