"""Block copies between the paged cache and staging slots."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

import torch

from pdstore.errors import LayoutError
from pdstore.keys import Part
from pdstore.layout import Layout
from pdstore.workers import DeviceApi

LayerCache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Piece(NamedTuple):
    """One value of one block: where it is in the paged cache, and its payload in a slot.

    block_ids: the engine blocks that hold the pool block's tokens, in order.
    num_tokens: tokens of the block; the payload has exactly these. A page counts as one.
    first_token: of a scatter: tokens before it are not written; a multiple of the engine's block.
    payload: the slot's bytes behind the header.
    """

    part: Part
    block_ids: Sequence[int]
    num_tokens: int
    first_token: int
    payload: memoryview


class PiecePlan(NamedTuple):
    """How payloads of a part with this many tokens move, and why so."""

    part: Part
    num_tokens: int
    path: str
    why: str


class Registrar(Protocol):
    """Who pins host memory for a device's copies."""

    def populate(self, address: int, num_bytes: int) -> None:
        """Makes the memory present, so that registering it is quick."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a piece; a payload must lie in one piece. Raises SwapError."""

    def unregister(self, address: int) -> None:
        """Unpins the piece that begins here. Raises SwapError."""


class ReadyEvent(Protocol):
    """Says when the paged cache may be copied; a `torch.cuda.Event` fits."""

    def synchronize(self) -> None: ...


class Swap(ABC):
    """Copies KV between an engine's paged cache and host slots; blocks until the bytes are there.

    What the model has still to write or read in these blocks is done before the call, or before the
    event that the copy follows: one that `to_follow` returned.
    `NativeSwap` is for speed; `TorchSwap` is the reference, and for machines without the library.
    """

    device: torch.device
    num_blocks: int
    device_api: DeviceApi | None = None
    """How threads that copy are put on the device; None: the usual way."""

    def to_follow(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """The event if copies can follow it by themselves; else waits for it here, and None."""
        if ready is not None:
            ready.synchronize()
        return None

    @abstractmethod
    def gather(self, pieces: Sequence[Piece], ready: ReadyEvent | None = None) -> None:
        """Paged cache -> slots."""

    @abstractmethod
    def scatter(self, pieces: Sequence[Piece], ready: ReadyEvent | None = None) -> None:
        """Slots -> paged cache; engine blocks that lie before `first_token` are not touched."""

    @property
    def registrar(self) -> Registrar | None:
        """Who has to pin the memory of payloads; None: it may be any."""
        return None

    @abstractmethod
    def plan(self) -> list[PiecePlan]:
        """Which path each part's blocks take, and why."""

    def relaxed(self) -> AbstractContextManager[None]:
        """While it lasts, the calling thread disturbs no other thread's graph capture."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Frees what the copies need; nothing may be copied any more. Twice is fine."""


class TorchSwap(Swap):
    """Block copies by torch, on any device.

    kv_caches: per layer one tensor [num_blocks, engine_block_tokens, local KV heads, channels],
      channels being K then V (for MLA the latent), or a pair (K, V) of such tensors. Any strides,
      but the last must be 1.
    Raises LayoutError where a tensor does not fit the layout.
    """

    def __init__(self, layout: Layout, kv_caches: Sequence[LayerCache]) -> None:
        self._layout = layout
        self._caches = caches_as_bytes(layout, kv_caches)
        self.device = self._caches[0][0].device
        self.num_blocks = self._caches[0][0].shape[0]

    def gather(self, pieces: Sequence[Piece], ready: ReadyEvent | None = None) -> None:
        self.to_follow(ready)
        for piece in pieces:
            ids = self._ids(piece.block_ids, piece.num_tokens)
            for cache, payload in self._layers(piece):
                rows = cache[ids][:, :, self._head_slice(piece.part)].flatten(0, 1)
                payload.copy_(rows[: piece.num_tokens])

    def scatter(self, pieces: Sequence[Piece], ready: ReadyEvent | None = None) -> None:
        self.to_follow(ready)
        step = self._layout.engine_block_tokens
        for piece in pieces:
            if piece.first_token % step:
                raise LayoutError(
                    f"first_token {piece.first_token} is not on an engine block of {step}"
                )
            ids = self._ids(piece.block_ids, piece.num_tokens)
            if len(set(piece.block_ids)) != len(piece.block_ids):
                raise LayoutError("a load names one block twice")
            whole = piece.num_tokens // step
            first = piece.first_token // step
            heads = self._head_slice(piece.part)
            for cache, payload in self._layers(piece):
                if whole > first:
                    rows = payload[first * step : whole * step]
                    rows = rows.reshape(whole - first, step, *rows.shape[1:])
                    cache[ids[first:whole], :, heads] = rows.to(self.device)
                if piece.num_tokens > max(whole, first) * step:
                    rest = payload[whole * step :].to(self.device)
                    cache[ids[whole], : len(rest), heads] = rest
        if self.device.type == "cuda":  # the writes above are only queued
            torch.cuda.current_stream(self.device).synchronize()

    def plan(self) -> list[PiecePlan]:
        tokens = self._layout.block_tokens
        return [PiecePlan(p, tokens, "TORCH", "by torch") for p in self._layout.owned_parts]

    def _layers(self, piece: Piece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each tensor of the part's layers: its cache, its payload as [token, head, bytes]."""
        layers = self._layout.groups[piece.part.group]
        heads = len(self._layout.heads_of(piece.part))
        width = sum(t.shape[3] for t in self._caches[layers[0]])
        payload = torch.frombuffer(piece.payload, dtype=torch.uint8)
        if self._layout.order == "token":
            view = payload.view(len(layers), piece.num_tokens, heads, width)
        else:
            view = payload.view(len(layers), heads, piece.num_tokens, width).transpose(1, 2)
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


def pages_as_cells(layout: Layout, kv_caches: Sequence[LayerCache]) -> list[LayerCache]:
    """The caches as `layout.cells` describes them: a page of one head as one token.

    Raises LayoutError for a page that is not in one piece.
    """
    if layout.order != "page":
        return list(kv_caches)
    caches_as_bytes(layout, kv_caches)
    return [_as_cells(layer, cache) for layer, cache in enumerate(kv_caches)]


def _as_cells(layer: int, cache: LayerCache) -> LayerCache:
    if isinstance(cache, tuple) or cache.stride(1) != cache.shape[3]:
        raise LayoutError(f"layer {layer}: the pages of one head must be in one piece each")
    blocks, tokens, heads, channels = cache.shape
    strides = (cache.stride(0), tokens * channels, cache.stride(2), 1)
    return cache.as_strided((blocks, 1, heads, tokens * channels), strides)


def caches_as_bytes(
    layout: Layout, kv_caches: Sequence[LayerCache]
) -> list[tuple[torch.Tensor, ...]]:
    """Each layer's cache tensors as bytes. Raises LayoutError where they do not fit the layout."""
    if len(kv_caches) != len(layout.layers):
        raise LayoutError(f"{len(kv_caches)} cache tensors for {len(layout.layers)} layers")
    caches = [_as_bytes(layout, n, cache) for n, cache in enumerate(kv_caches)]
    one = caches[0][0]
    if any(t.shape[0] != one.shape[0] or t.device != one.device for c in caches for t in c):
        raise LayoutError("all layers' caches must have as many blocks and be on one device")
    return caches


def _as_bytes(layout: Layout, layer: int, cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """A layer's cache tensors as bytes, after checking them against the layout."""
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
