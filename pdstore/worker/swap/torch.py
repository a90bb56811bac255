"""TorchSwap: block copies by torch, the reference implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdstore.errors import LayoutError
from pdstore.format.layout import Layout
from pdstore.format.namespace import Part
from pdstore.outcome import Direction
from pdstore.worker.swap.base import (
    BlockCopy,
    BlockCopyPlan,
    LayerCache,
    ReadyEvent,
    Swap,
    caches_as_bytes,
)


class TorchSwap(Swap):
    """Block copies by torch, on any device.

    kv_caches: for each layer one tensor [num_blocks, engine_block_tokens, local KV heads, channels]
      or a pair (K, V) of such tensors. The channels of one tensor are K then V; for MLA they are
      the latent. The last stride must be 1; the others may be any.
    Raises LayoutError for a tensor that does not fit the layout.
    """

    def __init__(self, layout: Layout, kv_caches: Sequence[LayerCache]) -> None:
        self._layout = layout
        self._caches = caches_as_bytes(layout, kv_caches)
        one = self._caches[layout.held_layers[0]][0]
        self.device = one.device
        self.num_blocks = one.shape[0]

    def gather(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.to_follow(ready)
        for copy in copies:
            ids = self._ids(copy.block_ids, copy.num_tokens)
            for cache, payload in self._layers(copy):
                rows = cache[ids][:, :, self._head_slice(copy.part)].flatten(0, 1)
                payload.copy_(rows[: copy.num_tokens])

    def scatter(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.to_follow(ready)
        step = self._layout.engine_block_tokens
        for copy in copies:
            if copy.first_token % step:
                raise LayoutError(
                    f"first_token {copy.first_token} is not on an engine block of {step}"
                )
            ids = self._ids(copy.block_ids, copy.num_tokens)
            if len(set(copy.block_ids)) != len(copy.block_ids):
                raise LayoutError("a load names one block twice")
            whole = copy.num_tokens // step
            first = copy.first_token // step
            heads = self._head_slice(copy.part)
            for cache, payload in self._layers(copy):
                if whole > first:
                    rows = payload[first * step : whole * step]
                    rows = rows.reshape(whole - first, step, *rows.shape[1:])
                    cache[ids[first:whole], :, heads] = rows.to(self.device)
                if copy.num_tokens > max(whole, first) * step:
                    rest = payload[whole * step :].to(self.device)
                    cache[ids[whole], : len(rest), heads] = rest
        if self.device.type == "cuda":  # the writes above are only queued
            torch.cuda.current_stream(self.device).synchronize()

    def plan(self, direction: Direction = Direction.SAVE) -> list[BlockCopyPlan]:
        tokens = self._layout.block_tokens
        return [BlockCopyPlan(p, tokens, "TORCH", "by torch") for p in self._layout.owned_parts]

    def _layers(self, copy: BlockCopy) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each cache tensor of the part's layers, with its payload as [token, head, bytes]."""
        layers = self._layout.groups[copy.part.group]
        heads = len(self._layout.heads_of(copy.part))
        width = sum(t.shape[3] for t in self._caches[layers[0]])
        payload = torch.frombuffer(copy.payload, dtype=torch.uint8)
        view = payload.view(len(layers), copy.num_tokens, heads, width)
        shares = []
        for i, layer in enumerate(layers):
            start = 0
            for cache in self._caches[layer]:
                shares.append((cache, view[i, :, :, start : start + cache.shape[3]]))
                start += cache.shape[3]
        return shares

    def _ids(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        if len(block_ids) * self._layout.engine_block_tokens < num_tokens:
            raise LayoutError(f"{len(block_ids)} engine blocks cannot hold {num_tokens} tokens")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise LayoutError(
                    f"block id {block_id} is outside the cache of {self.num_blocks} blocks"
                )
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)

    def _head_slice(self, part: Part) -> slice:
        heads = self._layout.heads_of(part)
        return slice(heads.start, heads.stop)
