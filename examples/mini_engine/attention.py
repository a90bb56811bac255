"""Attention over the paged cache, in the place of a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request


class Chunk(NamedTuple):
    """The tokens start..stop of a request, to go through the model in one step."""

    request: Request
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the model's answer to it is the request's next token."""
        return self.stop == len(self.request.token_ids)


class Step:
    """Where the tokens of one step, concatenated over its chunks, lie in the paged cache."""

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache) -> None:
        self.layers = cache.layers
        device = cache.layers[0].device
        ids = [chunk.request.token_ids[chunk.start : chunk.stop] for chunk in chunks]
        positions = [torch.arange(chunk.start, chunk.stop) for chunk in chunks]
        tables = [torch.tensor(chunk.request.block_ids) for chunk in chunks]
        slots = [
            table[where // cache.block_size] * cache.block_size + where % cache.block_size
            for table, where in zip(tables, positions, strict=True)
        ]
        self.token_ids = torch.tensor(list(chain.from_iterable(ids))).to(device)
        self.positions = torch.cat(positions).to(device)
        self._slots = torch.cat(slots).to(device)
        self._prefills: list[tuple[slice, Tensor, int]] = []
        rows, singles, row = [], [], 0
        for chunk, table in zip(chunks, tables, strict=True):
            used = table[: cache.blocks_for(chunk.stop)]
            if chunk.num_tokens == 1:
                rows.append(row)
                singles.append(used)
            else:
                chunk_rows = slice(row, row + chunk.num_tokens)
                self._prefills.append((chunk_rows, used.to(device), chunk.stop))
            row += chunk.num_tokens
        self._rows = torch.tensor(rows, dtype=torch.long, device=device)
        if singles:
            self._tables = torch.nn.utils.rnn.pad_sequence(singles, batch_first=True).to(device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts the step's K and V, each [kv heads, tokens, dim], into the cache."""
        slots = self.layers[layer].flatten(0, 1)
        slots[self._slots] = torch.cat([key, value], dim=-1).transpose(0, 1)

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of the step's queries [heads, tokens, dim] over each request's own K and V."""
        out = torch.empty_like(query)
        for rows, table, length in self._prefills:
            kv = self.layers[layer][table].flatten(0, 1)[:length].transpose(0, 1)
            out[:, rows] = _attend_chunk(query[:, rows], kv, scaling, window)
        if len(self._rows):
            kv = self.layers[layer][self._tables].flatten(1, 2).transpose(1, 2)
            ends = self.positions[self._rows]
            out[:, self._rows] = _attend_singles(query[:, self._rows], kv, ends, scaling, window)
        return out


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: tensors are [1, heads, tokens, dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    step.write(layer, key[0], value[0])
    return step.attend(layer, query[0], scaling, sliding_window).transpose(0, 1)[None], None


def _attend_chunk(query: Tensor, kv: Tensor, scaling: float, window: int | None) -> Tensor:
    """The last tokens' queries [heads, n, dim] over all tokens' K and V [kv heads, m, 2 * dim]."""
    n, m = query.shape[1], kv.shape[1]
    mask: Tensor | CausalBias = causal_lower_right(n, m)
    if window is not None and m > window:
        end = torch.arange(m - n, m, device=kv.device)[:, None]
        at = torch.arange(m, device=kv.device)
        mask = (at <= end) & (at > end - window)
    key, value = kv[None].chunk(2, dim=-1)
    return scaled_dot_product_attention(
        query[None], key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]


def _attend_singles(
    query: Tensor, kv: Tensor, ends: Tensor, scaling: float, window: int | None
) -> Tensor:
    """One query each of many requests [heads, requests, dim] over [requests, kv heads, m, 2 * dim].

    The heads that share a KV head stand in the place of tokens: no K or V is repeated.
    """
    heads, requests, dim = query.shape
    grouped = query.transpose(0, 1).reshape(requests, kv.shape[1], -1, dim)
    at = torch.arange(kv.shape[2], device=kv.device)
    mask = at <= ends[:, None]
    if window is not None:
        mask &= at > ends[:, None] - window
    key, value = kv.chunk(2, dim=-1)
    out = scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask[:, None, None], scale=scaling
    )
    return out.reshape(requests, heads, dim).transpose(0, 1)
