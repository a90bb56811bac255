"""Tiny models whose drafts are mostly right, and wrong without the draft's own KV of the prompt.

Drafts of random weights are never accepted. So the target is one decoder layer of random weights,
and the draft model is that layer again, with some noise in its weights. Its first projection takes
the embedding of the newest token and drops the target's hidden state. Thus it computes what the
target computes, of the same tokens but the first: a draft model sees each token one position
earlier. Norms that one of the two has and the other lacks change nothing, since each embedding has
a root mean square of 1. With weights this large a layer attends to few tokens. Behind a longer
prompt these are tokens of the prompt, whose keys and values a cold draft model lacks.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.vllm_checkpoints import llama_config, make_tiny

EAGLE_KIND, MTP_KIND = "llama_one_layer", "mtp"
NOISE = 0.02  # of the weights' own deviation: three of four drafted tokens are accepted
_WEIGHTS = "model.safetensors"
_LAYER = "model.layers.0."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make_target(directory: Path) -> Path:
    """Writes a Llama for which `make_eagle` makes draft models."""
    weights = _make_one_layer(EAGLE_KIND, directory)
    save_file(weights, directory / _WEIGHTS)
    return directory


def make_eagle(target: Path, directory: Path, seed: int = 0) -> Path:
    """Writes an EAGLE draft model of a target; another seed is other weights, as good as these."""
    draft = _noisy_layer(load_file(target / _WEIGHTS), seed)
    hidden = len(draft.pop("input_layernorm.weight"))  # EAGLE's first layer has none
    draft = {f"layers.0.{name}": weight for name, weight in draft.items()}
    taken, dropped = torch.eye(hidden), torch.zeros(hidden, hidden)
    draft["fc.weight"] = torch.cat([taken, dropped], dim=1)
    directory.mkdir(parents=True)
    save_file(draft, directory / _WEIGHTS)
    config = llama_config(num_hidden_layers=1).to_dict()
    described = config | {"architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def make_mtp(directory: Path, seed: int = 0) -> Path:
    """Writes a DeepSeek-V3 with one layer of multi-token prediction (MTP) in its checkpoint."""
    weights = _make_one_layer(MTP_KIND, directory)
    draft = _noisy_layer(weights, seed)
    ones = torch.ones_like(draft["input_layernorm.weight"])
    taken, dropped = torch.eye(len(ones)), torch.zeros(len(ones), len(ones))
    draft |= {
        "enorm.weight": ones,
        "hnorm.weight": ones.clone(),
        "eh_proj.weight": torch.cat([taken, dropped], dim=1),
        "embed_tokens.weight": weights[_EMBEDDING].clone(),
        "shared_head.norm.weight": ones.clone(),
        "shared_head.head.weight": weights[_HEAD].clone(),
    }
    weights |= {f"model.layers.1.{name}": weight for name, weight in draft.items()}
    save_file(weights, directory / _WEIGHTS)
    return directory


def _make_one_layer(kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint, and returns its weights with embeddings whose norm is themselves."""
    make_tiny(kind, directory)
    weights = load_file(directory / _WEIGHTS)
    table = weights[_EMBEDDING]
    weights[_EMBEDDING] = table / table.square().mean(dim=-1, keepdim=True).sqrt()
    return weights


def _noisy_layer(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Returns copies of the target's one layer's weights; its matrices have noise."""
    chance = torch.Generator().manual_seed(seed)
    layer = {}
    for name, weight in sorted(weights.items()):
        if name.startswith(_LAYER):
            noise = torch.randn(weight.shape, generator=chance) * weight.std()
            scale = NOISE if weight.dim() > 1 else 0.0  # none in norms
            layer[name.removeprefix(_LAYER)] = weight + scale * noise
    return layer
