"""Attention over the paged cache, in the place of a model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request


class Chunk(NamedTuple):
    """The tokens start..stop of a request, which go through the model in one step."""

    request: Request
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """True if the model's output for it is the request's next token."""
        return self.stop == len(self.request.token_ids)


class Step:
    """One pass through the model: the tokens of its chunks, and their places in the paged cache.

    Chunks of one token go through attention together, longer ones each by itself.

    layer_written: called in each layer, in order, when the step's K and V of that layer are in the
      cache; on a GPU their write is then queued on the current stream. An exception ends the step.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: PagedCache,
        layer_written: Callable[[int], None] | None = None,
    ) -> None:
        self._cache = cache
        self._layer_written = layer_written
        device = cache.device
        ids: list[int] = []
        rows: list[int] = []
        positions, slots, tables = [], [], []
        self._prefills: list[tuple[slice, Tensor, int]] = []  # rows, block table, tokens so far
        for chunk in chunks:
            where = torch.arange(chunk.start, chunk.stop)
            table = torch.tensor(chunk.request.block_ids[: cache.blocks_for(chunk.stop)])
            if chunk.num_tokens == 1:
                rows.append(len(ids))
                tables.append(table)
            else:
                its_rows = slice(len(ids), len(ids) + chunk.num_tokens)
                self._prefills.append((its_rows, table.to(device), chunk.stop))
            ids += chunk.request.token_ids[chunk.start : chunk.stop]
            positions.append(where)
            slots.append(cache.slots_of(table, where))
        self.token_ids = torch.tensor(ids).to(device)
        self.positions = torch.cat(positions).to(device)
        self._slots = torch.cat(slots).to(device)
        self._rows = torch.tensor(rows, dtype=torch.long).to(device)
        self._ends = self.positions[self._rows, None]
        self._masks: dict[int | None, Tensor] = {}
        self._tables = pad_sequence(tables, batch_first=True).to(device) if tables else None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the step's K and V, each [kv heads, tokens, dim], into the cache."""
        self._cache.write(layer, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        if self._layer_written is not None:
            self._layer_written(layer)

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """Returns the attention of the step's queries over each request's own K and V.

        query and result: [heads, tokens, dim]. window: tokens that a query sees; None: all.
        """
        out = torch.empty_like(query)
        for rows, table, length in self._prefills:
            kv = self._cache.read(layer, table)[:length].transpose(0, 1)
            out[:, rows] = _attend_chunk(query[:, rows], kv, scaling, window)
        if self._tables is not None:
            kv = self._cache.read(layer, self._tables).transpose(1, 2)
            mask = self._mask(kv.shape[2], window)
            out[:, self._rows] = _attend_singles(query[:, self._rows], kv, mask, scaling)
        return out

    def _mask(self, length: int, window: int | None) -> Tensor:
        """Returns which of the tokens 0..length each chunk of one token sees; cached by window."""
        if window not in self._masks:
            at = torch.arange(length, device=self._ends.device)
            seen = at <= self._ends
            self._masks[window] = seen if window is None else seen & (at > self._ends - window)
        return self._masks[window]


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
    """Computes one layer's attention for transformers: tensors are [1, heads, tokens, dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    step.write(layer, key[0], value[0])
    return step.attend(layer, query[0], scaling, sliding_window).transpose(0, 1)[None], None


def _attend_chunk(query: Tensor, kv: Tensor, scaling: float, window: int | None) -> Tensor:
    """Returns the attention of the last n tokens of a request over all its m tokens.

    query: [heads, n, dim]. kv: [kv heads, m, 2 * dim].
    """
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


def _attend_singles(query: Tensor, kv: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Returns the attention of one query of each of n requests over the request's K and V.

    query: [heads, n, dim]. kv: [n, kv heads, m, 2 * dim]. The heads that share a KV head take the
    place of the tokens, so no K or V is repeated.
    """
    heads, n, dim = query.shape
    grouped = query.transpose(0, 1).reshape(n, kv.shape[1], -1, dim)
    key, value = kv.chunk(2, dim=-1)
    out = scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask[:, None, None], scale=scaling
    )
    return out.reshape(n, heads, dim).transpose(0, 1)
