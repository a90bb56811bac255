"""Stand-ins for what vLLM hands to a connector: its block pool, and a request of token ids."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

GROUP = SimpleNamespace(kv_cache_spec=None, layer_names=[])
"""A KV group of layers that no test looks at."""


class BlockPool:
    """Counts references to blocks, as vLLM's BlockPool does."""

    def __init__(self) -> None:
        self.blocks = list(range(64))
        self.held: list[int] = []

    def touch(self, blocks) -> None:
        self.held += blocks

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            self.held.remove(block)


def vllm_config(*, batches=1, is_consumer=True):
    """vLLM's configuration of an instance with so many steps in flight at once."""
    transfer = SimpleNamespace(is_kv_consumer=is_consumer)
    return SimpleNamespace(max_concurrent_batches=batches, kv_transfer_config=transfer)


def vllm_request(prompt, **changes):
    """vLLM's request of a prompt, of which nothing is computed yet."""
    usual = {
        "request_id": "r",
        "prompt_token_ids": prompt,
        "prompt_embeds": None,
        "pooling_params": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "kv_transfer_params": None,
        "num_tokens": len(prompt),
        "num_computed_tokens": 0,
        "num_prompt_tokens": len(prompt),
        "num_output_tokens": 0,
        "all_token_ids": prompt,
    }
    return SimpleNamespace(**usual | changes)


def item(**data):
    """The processed data of an image, sound or video, as vLLM's processor makes it."""
    field = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(value, field) for name, value in data.items()}
    )


def picture(seed, name="img-0", *, data=None, offset=70, **changes):
    """A picture of random pixels in a request, under the name that a client has given it."""
    if data is None:
        chance = torch.Generator().manual_seed(seed)
        data = item(pixel_values=torch.rand(3, 8, 8, generator=chance))
    usual = {
        "data": data,
        "modality": "image",
        "identifier": name,
        "mm_hash": name,
        "mm_position": PlaceholderRange(offset, 16),
    }
    return MultiModalFeatureSpec(**usual | changes)
