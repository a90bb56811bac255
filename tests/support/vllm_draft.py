"""A tiny random EAGLE draft model: one layer of the shape of the tiny Llama's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.vllm_checkpoints import llama_config

NUM_DRAFT_LAYERS = 1


def make_draft(directory: Path, seed: int = 0) -> Path:
    """Writes the draft model's checkpoint; its drafts are nearly never right."""
    config = llama_config(num_hidden_layers=NUM_DRAFT_LAYERS)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    chance = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": 0.2 * torch.randn(shape, generator=chance)
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    described = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described))
    return directory
