"""Views of an engine's cache tensors as bytes, checked against the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from pdstore.errors import LayoutError
from pdstore.format.layout import Layout

LayerCache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def pages_as_cells(layout: Layout, kv_caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Views the caches as `layout.cells` describes them: one head's packed page as one token.

    Returns `kv_caches` unchanged for a layout without packed pages.
    Raises LayoutError for a page that is not contiguous.
    """
    if layout.order != "page":
        return list(kv_caches)
    caches_as_bytes(layout, kv_caches)
    return [
        _as_cells(layer, cache) for layer, cache in zip(layout.held_layers, kv_caches, strict=True)
    ]


def _as_cells(layer: int, cache: LayerCache) -> LayerCache:
    if isinstance(cache, tuple) or cache.stride(1) != cache.shape[3]:
        raise LayoutError(f"layer {layer}: each page of a head must be contiguous")
    blocks, tokens, heads, channels = cache.shape
    strides = (cache.stride(0), tokens * channels, cache.stride(2), 1)
    return cache.as_strided((blocks, 1, heads, tokens * channels), strides)


def caches_as_bytes(
    layout: Layout, kv_caches: Sequence[LayerCache]
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Views the cache tensors of each layer that this rank holds as bytes, by the layer's number.

    Raises LayoutError if they do not fit.
    """
    held = layout.held_layers
    if len(kv_caches) != len(held):
        raise LayoutError(f"{len(kv_caches)} cache tensors for {len(held)} layers")
    caches = {n: _as_bytes(layout, n, cache) for n, cache in zip(held, kv_caches, strict=True)}
    one = caches[held[0]][0]
    tensors = [tensor for cache in caches.values() for tensor in cache]
    if any(t.shape[0] != one.shape[0] or t.device != one.device for t in tensors):
        raise LayoutError("all caches must have the same number of blocks and be on one device")
    return caches


def _as_bytes(layout: Layout, layer: int, cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """Checks a layer's cache tensors against the layout and views them as bytes."""
    tensors = cache if isinstance(cache, tuple) else (cache,)
    dtype = getattr(torch, layout.dtype)
    expected = (layout.engine_block_tokens, layout.local_heads(layer))
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.dim() != 4 or tuple(tensor.shape[1:3]) != expected:
            raise LayoutError(
                f"layer {layer}: cache of {tensor.dtype} {tuple(tensor.shape)}, expected {dtype}"
                f" [blocks, {expected[0]}, {expected[1]}, channels]"
            )
        if tensor.stride(3) != 1:
            raise LayoutError(f"layer {layer}: the cache's last dimension must be contiguous")
    channels = sum(t.shape[3] for t in tensors)
    if channels != layout.layers[layer].channels:
        raise LayoutError(
            f"layer {layer}: {channels} channels, expected {layout.layers[layer].channels}"
        )
    return tuple(t.view(torch.uint8) for t in tensors)
