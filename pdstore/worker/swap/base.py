"""Swap: the contract of block copies between an engine's paged cache and host memory.

Functions here view an engine's cache tensors as bytes, and check them against the layout. TorchSwap
makes the copies by torch; it is the reference implementation.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

import torch

from pdstore.async_runner import CudaApi
from pdstore.errors import Direction, LayoutError
from pdstore.format.block import checksum
from pdstore.format.geometry import CacheGeometry, Geometry
from pdstore.format.keys import Part
from pdstore.format.layout import Layout

LayerCache: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class BlockCopy(NamedTuple):
    """One copy between a part of a block in the paged cache and the same bytes in host memory.

    part: the layers and heads that are copied; one of `Layout.owned_parts`.
    block_ids: the engine blocks that hold the block's tokens, in order.
    num_tokens: the number of the block's tokens; a cell of several tokens, such as a packed page,
      counts as one token here.
    first_token: scatter does not write tokens before it, counted in the same way; a multiple of
      the engine's block size.
    payload: `Layout.payload_bytes` writable bytes of host memory. Any memory will do, unless
      `Swap.registrar` has to pin it.
    """

    part: Part
    block_ids: Sequence[int]
    num_tokens: int
    first_token: int
    payload: memoryview


class BlockCopyPlan(NamedTuple):
    """The copy path for a part's payloads of `num_tokens` tokens, and why it was chosen."""

    part: Part
    num_tokens: int
    path: str
    why: str


class Registrar(Protocol):
    """Pins host memory for a device's copies."""

    def populate(self, address: int, num_bytes: int) -> None:
        """Faults in the pages of a range, so that registering it is quick."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a range; a payload must lie within one registered range. Raises SwapError."""

    def unregister(self, address: int) -> None:
        """Unpins the range that was registered at this address. Raises SwapError."""


class ReadyEvent(Protocol):
    """Fires when the paged cache may be copied; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Blocks until the event fires."""

    def query(self) -> bool:
        """Returns True if the event has fired."""


class _Fired:
    """An event that has fired already."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        return True


READY_NOW: ReadyEvent = _Fired()
"""An event for `KVPool.load` if no work that is queued on the device uses the blocks."""


class Swap(ABC):
    """Copies KV between an engine's paged cache and host memory. Any thread may call it.

    `gather` and `scatter` block until the bytes are there. The model must have finished with the
    blocks before the call, or before the event `ready`, which the copy waits for.

    `NativeSwap` is the fast implementation; `TorchSwap` is the reference, and the one for machines
    without the native library. `open_swap` chooses.
    """

    device: torch.device
    num_blocks: Mapping[int, int]
    """The number of engine blocks in the caches of each block table that has some on this rank."""
    device_api: CudaApi | None = None
    """The calls that put a copying thread on the device; None means a plain `CudaApi`."""

    def device_event_or_wait(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if the device can wait for it; else waits for it and returns None."""
        if ready is not None:
            ready.synchronize()
        return None

    @abstractmethod
    def gather(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        """Copies from the paged cache into the payloads. Raises LayoutError or SwapError."""

    @abstractmethod
    def scatter(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        """Copies from the payloads into the paged cache. Raises LayoutError or SwapError.

        Engine blocks before `first_token` are not written.
        """

    def start_scatter(
        self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None
    ) -> Callable[[], None]:
        """Starts a scatter. The returned function waits for its end and raises its error.

        Call that function once; until it returns, payloads and paged cache must stay as they are.
        """
        self.scatter(copies, ready)
        return lambda: None  # it has ended

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        """Returns the `block.checksum` of each value; each has at least 64 bytes."""
        return [checksum(value) for value in values]

    @property
    def registrar(self) -> Registrar | None:
        """The object that pins the memory that payloads must lie in; None if any memory will do."""
        return None

    @abstractmethod
    def plan(self, direction: Direction = Direction.SAVE) -> list[BlockCopyPlan]:
        """Returns the copy path of each part's blocks for copies of one direction."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Returns a context in which its thread disturbs no other thread's graph capture."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - TorchSwap has nothing to free
        """Frees the engine; no copy may run or follow. May be called again."""


class ByteCaches(NamedTuple):
    """A rank's cache tensors, viewed as bytes.

    tensors: by the cache's number in the geometry, [blocks, cells of a block, local KV heads, bytes
      of a cell]; of a tuple of tensors, such as a pair (K, V), each has a part of the cell.
    num_blocks: as in `Swap`.
    """

    tensors: dict[int, tuple[torch.Tensor, ...]]
    device: torch.device
    num_blocks: dict[int, int]


def caches_as_bytes(geometry: Geometry, kv_caches: Sequence[LayerCache]) -> ByteCaches:
    """Views a rank's cache tensors as bytes. Raises LayoutError if they do not fit the geometry."""
    held = geometry.caches
    if len(kv_caches) != len(held):
        raise LayoutError(f"{len(kv_caches)} cache tensors for {len(held)} caches of the layout")
    views = {
        number: _as_bytes(number, cells, cache)
        for (number, cells), cache in zip(held.items(), kv_caches, strict=True)
    }
    found = {(held[n].table, len(view), view.device) for n, pair in views.items() for view in pair}
    num_blocks = {table: count for table, count, _ in found}
    devices = {device for _, _, device in found}
    if len(found) > len(num_blocks) or len(devices) > 1:
        raise LayoutError(
            "all caches of a block table must have the same number of blocks, and all caches must"
            " be on one device"
        )
    return ByteCaches(views, devices.pop(), num_blocks)


def _as_bytes(number: int, cells: CacheGeometry, cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """Checks the tensors of one cache against its geometry and views them as bytes."""
    if cells.dtype is None or cells.cell_tokens is None:
        return (_block_as_cell(number, cells, cache),)
    tensors, scales = _without_scales(number, cells, cache)
    dtype = getattr(torch, cells.dtype)
    expected = (cells.entry_tokens, cells.num_heads)
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.dim() != 4 or tuple(tensor.shape[1:3]) != expected:
            raise LayoutError(
                f"layer {number}: cache of {tensor.dtype} {tuple(tensor.shape)}, expected {dtype}"
                f" [blocks, {expected[0]}, {expected[1]}, channels]"
            )
        if tensor.stride(3) != 1:
            raise LayoutError(f"layer {number}: the cache's last dimension must be contiguous")
    channels = sum(t.shape[3] for t in tensors)
    of_scales = sum(each.itemsize for each in scales)
    wanted = (cells.cell_bytes - of_scales) // (cells.cell_tokens * dtype.itemsize)
    if channels != wanted:
        raise LayoutError(f"layer {number}: {channels} channels, expected {wanted}")
    if cells.cell_tokens > 1:
        tensors = (_page_as_cell(number, cache),)
    return tuple(t.view(torch.uint8) for t in (*tensors, *scales))


def _without_scales(
    number: int, cells: CacheGeometry, cache: LayerCache
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Returns the tensors with K and V, and those with scales as [blocks, tokens, heads, 1]."""
    tensors = cache if isinstance(cache, tuple) else (cache,)
    num_scales = len(cells.scales)
    num_others = len(tensors) - num_scales
    if not 1 <= num_others <= 2:
        behind = "`LayerSpec.scales` names no scales"
        if num_scales:
            behind = f"then {num_scales} with scales of torch.{cells.scales[0]}"
        raise LayoutError(
            f"layer {number}: {len(tensors)} tensors, expected one or two with K and V, and"
            f" {behind}"
        )
    pairs = zip(tensors[num_others:], cells.scales, strict=True)
    scales = [_checked_scales(number, cells, tensor, dtype) for tensor, dtype in pairs]
    return tensors[:num_others], scales


def _checked_scales(
    number: int, cells: CacheGeometry, scales: torch.Tensor, dtype: str
) -> torch.Tensor:
    """Returns a tensor of scales as [blocks, tokens of an engine block, local KV heads, 1]."""
    each = scales.squeeze(3) if scales.dim() == 4 else scales
    given = f"layer {number}: scales of {scales.dtype} {tuple(scales.shape)}"
    expected = (cells.entry_tokens, cells.num_heads)
    if each.dtype == getattr(torch, dtype) and tuple(each.shape[1:]) == expected:
        return each.unsqueeze(3)
    if cells.entry_tokens != 1 and each.shape[1:].numel() in (1, cells.num_heads):
        raise LayoutError(
            f"{given}: one scale for all tokens of a block. A prompt's tail is stored without the"
            " block's other tokens, and P and D may have blocks of other sizes: have the engine"
            " quantize with a scale for each token and head, or with scales in the checkpoint"
        )
    raise LayoutError(
        f"{given}, expected torch.{dtype} [blocks, {expected[0]}, {expected[1]}]: a scale for each"
        " token and head (a view in this order will do)"
    )


def _page_as_cell(number: int, cache: LayerCache) -> torch.Tensor:
    """Views a cache as [blocks, 1, local KV heads, elements of a page of one head]."""
    if isinstance(cache, tuple) or cache.stride(1) != cache.shape[3]:
        raise LayoutError(f"layer {number}: each page of a head must be contiguous")
    blocks, tokens, heads, channels = cache.shape
    strides = (cache.stride(0), tokens * channels, cache.stride(2), 1)
    return cache.as_strided((blocks, 1, heads, tokens * channels), strides)


def _block_as_cell(number: int, cells: CacheGeometry, cache: LayerCache) -> torch.Tensor:
    """Views a cache as [blocks, 1, 1, bytes of a block]; there may be gaps between its blocks."""
    if isinstance(cache, tuple) or not cache[0].is_contiguous():
        raise LayoutError(f"cache {number}: the bytes of each block must be contiguous")
    if cache[0].nbytes != cells.cell_bytes:
        raise LayoutError(
            f"cache {number}: {cache[0].nbytes} bytes a block, expected {cells.cell_bytes}"
        )
    return cache.flatten(1).view(torch.uint8)[:, None, None]


class TorchSwap(Swap):
    """Block copies by torch, on any device.

    kv_caches: for each layer one tensor [blocks, tokens of an engine block, local KV heads,
      channels] or a pair (K, V) of such tensors. The channels of a single tensor are K and then V;
      for MLA they are the latent. The last stride must be 1; the other strides may have any value.
      Of a layer with `LayerSpec.scales` a tuple that ends with the scales of K and those of V (MLA
      has one tensor of scales): each [blocks, tokens, heads] or [blocks, tokens, heads, 1].
      For a layer with states or pages, and for each cache of a layout with `given` geometry: a
      tensor [blocks, ...] of any type, with the bytes of each block contiguous.
    Raises LayoutError for a tensor that does not fit the layout.
    """

    def __init__(self, layout: Layout, kv_caches: Sequence[LayerCache]) -> None:
        self._geometry = layout.geometry
        caches = caches_as_bytes(layout.geometry, kv_caches)
        self._caches, self.device, self.num_blocks = caches

    def gather(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.device_event_or_wait(ready)
        for copy in copies:
            ids = self._ids(copy)
            heads = self._geometry.parts[copy.part].heads
            for cache, payload in self._layers(copy):
                rows = cache[ids][:, :, heads].flatten(0, 1)
                payload.copy_(rows[: copy.num_tokens])

    def scatter(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.device_event_or_wait(ready)
        for copy in copies:
            geometry = self._geometry.parts[copy.part]
            step = geometry.cache.entry_cells
            heads = geometry.heads
            if copy.first_token % step:
                raise LayoutError(
                    f"first_token {copy.first_token} is not on an engine block of {step}"
                )
            ids = self._ids(copy)
            if len(set(copy.block_ids)) != len(copy.block_ids):
                raise LayoutError("a load names one block twice")
            whole = copy.num_tokens // step
            first = copy.first_token // step
            for cache, payload in self._layers(copy):
                if whole > first:
                    rows = payload[first * step : whole * step]
                    rows = rows.reshape(whole - first, step, *rows.shape[1:])
                    cache[ids[first:whole], :, heads] = rows.to(self.device)
                if copy.num_tokens > max(whole, first) * step:
                    rest = payload[whole * step :].to(self.device)
                    cache[ids[whole], : len(rest), heads] = rest
        if self.device.type == "cuda":  # there the writes above are queued, and may not have run
            torch.cuda.current_stream(self.device).synchronize()

    def plan(self, direction: Direction = Direction.SAVE) -> list[BlockCopyPlan]:
        block_tokens = self._geometry.block_tokens
        counts = {p: of.cache.num_cells(block_tokens) for p, of in self._geometry.parts.items()}
        return [BlockCopyPlan(part, n, "TORCH", "by torch") for part, n in counts.items()]

    def _layers(self, copy: BlockCopy) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each cache tensor of the part's layers with its [cell, head, bytes] payload."""
        geometry = self._geometry.parts[copy.part]
        payload = torch.frombuffer(copy.payload, dtype=torch.uint8)
        cell_bytes = geometry.cache.cell_bytes
        shape = len(geometry.layers), copy.num_tokens, geometry.num_heads, cell_bytes
        view = payload.view(shape)
        views = []
        for i, layer in enumerate(geometry.layers):
            start = 0
            for cache in self._caches[layer]:
                views.append((cache, view[i, :, :, start : start + cache.shape[3]]))
                start += cache.shape[3]
        return views

    def _ids(self, copy: BlockCopy) -> torch.Tensor:
        block_ids, num_tokens = copy.block_ids, copy.num_tokens
        cache = self._geometry.parts[copy.part].cache
        if len(block_ids) * cache.entry_cells < num_tokens:
            raise LayoutError(f"{len(block_ids)} engine blocks cannot hold {num_tokens} tokens")
        num_blocks = self.num_blocks[cache.table]
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise LayoutError(
                    f"block id {block_id} is outside the cache of {num_blocks} blocks"
                )
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
