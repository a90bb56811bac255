"""Checks of a layout: numbers of tokens, shards, ranges and stages that do not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdstore.errors import LayoutError
from pdstore.settings import Settings

if TYPE_CHECKING:
    from pdstore.format.layout import Layout


def check_layout(layout: Layout) -> None:
    """Raises LayoutError for numbers that do not fit together."""
    if not layout.layers:
        raise LayoutError("a layout needs at least one layer")
    if not isinstance(getattr(torch, layout.dtype, None), torch.dtype):
        raise LayoutError(f"{layout.dtype!r} is no torch dtype")
    if (layout.order == "page") != (layout.page is not None):
        raise LayoutError("the order is that of pages if, and only if, `page` says how")
    if layout.block_tokens % layout.engine_block_tokens or (
        layout.order == "page" and layout.block_tokens != layout.engine_block_tokens
    ):
        raise LayoutError(
            f"PDSTORE_BLOCK_TOKENS={layout.block_tokens} must be a multiple of the engine's block"
            f" of {layout.engine_block_tokens} tokens"
        )
    if layout.num_shards % layout.tp_size or not 0 <= layout.tp_rank < layout.tp_size:
        raise LayoutError(
            f"PDSTORE_KV_SHARDS={layout.num_shards} must be a multiple of the TP size"
            f" {layout.tp_size}, and rank {layout.tp_rank} below it"
        )
    _check_splits(layout)


def check_pages_are_shared(settings: Settings) -> None:
    """Raises LayoutError if tenants are kept apart, because pages would tell one of another."""
    if settings.salt is not None:
        raise LayoutError(
            "PDSTORE_SALT keeps tenants apart, and this engine's pages are stored whole, with"
            " what an earlier request left in them: they cannot be used together"
        )


def _check_splits(layout: Layout) -> None:
    """Raises LayoutError for layers and heads that do not split as asked."""
    layers = layout.layers
    if not 1 <= layout.num_ranges <= len(layers):
        raise LayoutError(f"{len(layers)} layers do not make {layout.num_ranges} ranges")
    for spec in layers:
        if spec.kind != "mla" and spec.num_kv_heads % layout.num_shards:
            raise LayoutError(
                f"{spec.num_kv_heads} KV heads do not split into {layout.num_shards} shards:"
                " PDSTORE_KV_SHARDS and the TP size must divide them (KV heads that several"
                " ranks hold copies of are not supported)"
            )
    if layout.pipeline is not None:
        layout.pipeline.check(layers, layout.num_ranges)
