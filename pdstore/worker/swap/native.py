"""NativeSwap: block copies by pdstore's native library, libpdstore."""

from __future__ import annotations

import contextlib
import logging
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch

from pdstore.async_runner import CudaApi
from pdstore.errors import Direction, LayoutError
from pdstore.format.geometry import PartGeometry
from pdstore.format.keys import Part
from pdstore.format.layout import Layout
from pdstore.native.engine import Engine, Ticket
from pdstore.native.library import CPU, RELAXED, CopyPath, Library, PartShape, Region, address_of
from pdstore.worker.swap.base import (
    BlockCopy,
    BlockCopyPlan,
    LayerCache,
    ReadyEvent,
    Registrar,
    Swap,
    caches_as_bytes,
)

log = logging.getLogger(__name__)

_ITEM = struct.Struct("=Qiiii")
_WAIT_S = 30.0
FOLLOW_NOTHING = 0
DEFAULT_STREAM = 1  # CUDA's handle of the stream that torch calls 0

Packed: TypeAlias = tuple[bytes, bytes]
"""Block copies as items and block ids of the library; their payloads' memory must stay alive."""


class RelaxedCudaApi(CudaApi):
    """Puts threads on a device, in a mode that disturbs no other thread's graph capture."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def reset_stream(self, index: int) -> None:
        super().reset_stream(index)
        self._library.exchange_capture_mode(RELAXED)


class NativeSwap(Swap):
    """Block copies by the native engine, on one GPU or in host memory. Any thread may call it.

    kv_caches: as `TorchSwap` takes them; kept until `close`.
    path, sizes: a copy path, and values for fields of `abi.Options`; for tests and benchmarks.
    On a GPU, payloads must lie in memory that `register` pinned or `add_host` added.
    Raises LayoutError, DeviceError or SwapError.

    engine: the library's engine, for other calls of the library that copy blocks with it.
    """

    def __init__(
        self,
        library: Library,
        layout: Layout,
        kv_caches: Sequence[LayerCache],
        *,
        path: CopyPath = CopyPath.AUTO,
        sizes: dict[str, int] | None = None,
    ) -> None:
        self._geometry = layout.geometry
        caches = caches_as_bytes(layout.geometry, kv_caches)
        self._caches, self.device, self.num_blocks = caches
        self._library = library
        self._ordinal = CPU if self.device.type == "cpu" else self.device.index
        if self.device.type == "cuda":
            self.device_api = RelaxedCudaApi(library)
        parts = layout.geometry.parts
        self._parts = {part: number for number, part in enumerate(parts)}
        options = {"device": self._ordinal, "path": int(path), **(sizes or {})}
        shapes = [self._shape(part) for part in parts.values()]
        regions = [r for n, part in enumerate(parts.values()) for r in self._regions(n, part)]
        self.engine = Engine(library, options, shapes, regions)

    def device_event_or_wait(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if it is a CUDA event for the device; else waits for it, returns None."""
        is_cuda = self.device.type == "cuda" and isinstance(ready, torch.cuda.Event)
        return ready if is_cuda else super().device_event_or_wait(ready)

    def gather(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.finish(self.start(Direction.SAVE, copies, ready=self.handle_of(ready)))

    def scatter(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        self.start_scatter(copies, ready)()

    def start_scatter(
        self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None
    ) -> Callable[[], None]:
        ticket = self.start(Direction.LOAD, copies, ready=self.handle_of(ready))
        return partial(self.finish, ticket)

    def start(
        self,
        direction: Direction,
        copies: Sequence[BlockCopy],
        *,
        stream: int = FOLLOW_NOTHING,
        ready: int = 0,
    ) -> Ticket:
        """Starts a copy; nobody may change the cache's blocks or the payloads before its end.

        stream, ready: as `Engine.submit` takes them.
        Raises SwapError if the stream is being captured into a graph.
        """
        return self.submit(direction, self.pack(direction, copies), stream=stream, ready=ready)

    def pack(self, direction: Direction, copies: Sequence[BlockCopy]) -> Packed:
        """Packs copies for `submit`; a pack may be submitted several times."""
        if not copies:
            return b"", b""
        parts, block_ids, num_tokens, first_tokens, payloads = zip(*copies, strict=True)
        for part, tokens, payload in zip(parts, num_tokens, payloads, strict=True):
            if part not in self._parts:
                raise LayoutError(f"{part} is not owned by this rank")
            need = self._geometry.parts[part].num_bytes(tokens)
            if len(payload) != need:
                raise LayoutError(f"a payload of {len(payload)} bytes, expected {need}")
        first = first_tokens if direction is Direction.LOAD else [0] * len(copies)
        return self.pack_columns(parts, block_ids, num_tokens, first, map(address_of, payloads))

    def pack_columns(
        self,
        parts: Sequence[Part],
        block_ids: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        first_tokens: Sequence[int],
        payloads: Iterable[int],
    ) -> Packed:
        """Packs copies that are given as columns; the parts must be owned by this rank.

        payloads: the payloads' addresses; 0 if the library's call sets the addresses itself.
        """
        items = self.pack_items(payloads, parts, num_tokens, first_tokens, map(len, block_ids))
        return items, array("q", chain.from_iterable(block_ids)).tobytes()

    def pack_items(
        self,
        payloads: Iterable[int],
        parts: Sequence[Part],
        num_tokens: Sequence[int],
        first_tokens: Sequence[int],
        num_block_ids: Iterable[int],
    ) -> bytes:
        """Packs every column of block copies except the block ids.

        num_block_ids: how many block ids each copy has.
        """
        numbers = map(self._parts.__getitem__, parts)
        columns = payloads, numbers, num_tokens, first_tokens, num_block_ids
        return b"".join(map(_ITEM.pack, *columns))

    def submit(
        self, direction: Direction, packed: Packed, *, stream: int = FOLLOW_NOTHING, ready: int = 0
    ) -> Ticket:
        """Starts packed copies; `start` describes the arguments."""
        way = int(direction is Direction.LOAD)
        return self.engine.submit(way, *packed, stream=stream, ready=ready)

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        addresses = [address_of(value) for value in values]
        return self._library.sum_values(addresses, [len(value) for value in values])

    @property
    def registrar(self) -> Registrar | None:
        return None if self._ordinal == CPU else self

    def populate(self, address: int, num_bytes: int) -> None:
        self._library.populate(address, num_bytes)

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a range of host memory; payloads may lie in it from then on. Raises SwapError."""
        self._library.register(self._ordinal, address, num_bytes)
        self.add_host(address, num_bytes)

    def unregister(self, address: int) -> None:
        self._library.unregister(self._ordinal, address)

    def add_host(self, address: int, num_bytes: int) -> None:
        """Adds a range of memory; from then on every payload must lie within one such range."""
        self.engine.add_host(address, num_bytes)

    def plan(self, direction: Direction = Direction.SAVE) -> list[BlockCopyPlan]:
        """Returns for each part the copy path of a whole block and of a tail of one token."""
        way = int(direction is Direction.LOAD)
        return [
            BlockCopyPlan(part, n, *self.engine.explain(way, self._parts[part], n))
            for part, geometry in self._geometry.parts.items()
            for n in sorted({self._max_cells(geometry), 1}, reverse=True)
        ]

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        before = self._library.exchange_capture_mode(RELAXED)
        try:
            yield
        finally:
            self._library.exchange_capture_mode(before)

    def close(self) -> None:
        self.engine.close()

    def handle_of(self, ready: ReadyEvent | None) -> int:
        """Returns the handle of a CUDA event; waits for any other event and returns 0."""
        event = self.device_event_or_wait(ready)
        return int(event.cuda_event) if isinstance(event, torch.cuda.Event) else FOLLOW_NOTHING

    def finish(self, ticket: Ticket) -> None:
        """Waits for a copy without a timeout: the device may use the payloads until its end."""
        while not ticket.wait(_WAIT_S):
            log.warning("a block copy is still running after %d s", _WAIT_S)

    def _shape(self, geometry: PartGeometry) -> PartShape:  # type: ignore[valid-type]
        return PartShape(
            num_layers=len(geometry.layers),
            num_heads=geometry.num_heads,
            cell=geometry.cache.cell_bytes,
            num_blocks=self.num_blocks[geometry.cache.table],
            block_tokens=geometry.cache.entry_cells,
            max_tokens=self._max_cells(geometry),
        )

    def _max_cells(self, geometry: PartGeometry) -> int:
        """Returns how many cells a whole block of the pool has, of one head and layer."""
        return geometry.cache.num_cells(self._geometry.block_tokens)

    def _regions(self, number: int, geometry: PartGeometry) -> list[Region]:  # type: ignore[valid-type]
        """Returns the cache tensors of a part, each from the part's first head on; K before V."""
        regions = []
        for n, layer in enumerate(geometry.layers):
            start = 0
            for cache in self._caches[layer]:
                block, token, head, _ = cache.stride()
                regions.append(
                    Region(
                        base=cache.data_ptr() + geometry.first_head * head,
                        block_stride=block,
                        token_stride=token,
                        head_stride=head,
                        width=cache.shape[3],
                        start=start,
                        layer=n,
                        part=number,
                    )
                )
                start += cache.shape[3]
        return regions
