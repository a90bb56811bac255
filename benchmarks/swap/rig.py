"""One shape of KV cache on a GPU with pinned slots, and every way to copy between the two."""

from __future__ import annotations

import mmap
import random
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.swap.library import BenchLibrary
from pdstore.errors import Direction, SwapError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.identity import Identity, LayerSpec
from pdstore.format.layout import Layout
from pdstore.native.library import CopyPath, address_of
from pdstore.worker.swap.base import BlockCopy
from pdstore.worker.swap.native import NativeSwap, Packed
from pdstore.worker.transfer.staging import SPAN_BYTES, PinnedMemory, slot_bytes_for, spans_of

OUT, IN = Direction.SAVE, Direction.LOAD
METHODS = {
    "memcpy per piece": 0,
    "one batch call": 1,
    "a thread block per KV block": 2,
    "2 thread blocks, zero-copy": 3,
}
_DEVICE_TABLES = (2, 3)


class SwapShape(NamedTuple):
    """The shape of one engine block's KV: a contiguous piece in each of the cache's regions."""

    name: str
    num_regions: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_regions * self.piece_bytes


class Rig:
    """Random blocks of a cache, random slots of a ring, and native swaps between them.

    n: blocks in the cache and in the ring; any number up to it can be measured.
    """

    def __init__(self, library: BenchLibrary, shape: SwapShape, n: int) -> None:
        self.shape, self.n = shape, n
        self._library = library
        layer = LayerSpec.latent(shape.piece_bytes)
        identity = Identity("uint8", (layer,) * shape.num_regions, block_tokens=1, rope="")
        self.layout = Layout(identity, engine_block_tokens=1)
        num_blocks = n + n // 4 + 1
        size = (shape.num_regions, num_blocks, 1, 1, shape.piece_bytes)
        self.cache = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
        self.slot_bytes = slot_bytes_for(shape.block_bytes)
        self._memory = memoryview(mmap.mmap(-1, n * self.slot_bytes))
        spans = spans_of(address_of(self._memory), len(self._memory), self.slot_bytes, SPAN_BYTES)
        chance = random.Random(0)
        self.ids = chance.sample(range(num_blocks), n)
        self.slots = chance.sample(range(n), n)
        self.serving = self.swap()
        self._pinned = PinnedMemory(self._memory, self.slot_bytes, self.serving)
        self._spans = spans
        self._pinned.ready(60)

    def swap(
        self, path: CopyPath = CopyPath.AUTO, *, sizes: dict[str, int] | None = None
    ) -> NativeSwap:
        """Returns another swap over the same memory."""
        caches = list(self.cache)
        made = NativeSwap(self._library, self.layout, caches, path=path, sizes=sizes)
        for span in getattr(self, "_spans", ()):
            made.add_host(*span)
        return made

    def pack(self, direction: Direction, n: int, first: int = 0) -> Packed:
        """Returns the copy of n blocks from one of them on."""
        return self.serving.pack(direction, [self.piece(i) for i in range(first, first + n)])

    def check(self, copy: Callable[[Direction], object]) -> None:
        """Saves into poisoned slots and loads into poisoned blocks; raises on a wrong byte."""
        ids = torch.tensor(self.ids, device="cuda")
        want = self.cache[:, ids].clone()
        host = torch.frombuffer(self._memory, dtype=torch.uint8)
        host.fill_(0xA5)
        copy(OUT)
        rows = host.view(self.n, self.slot_bytes)[torch.tensor(self.slots)]
        got = rows[:, HEADER_BYTES : HEADER_BYTES + self.shape.block_bytes].cuda()
        got = got.view(self.n, self.shape.num_regions, self.shape.piece_bytes).transpose(0, 1)
        gaps = bool((rows[:, :HEADER_BYTES] == 0xA5).all())
        self.cache.fill_(0xA5)
        torch.cuda.synchronize()
        copy(IN)
        others = torch.ones(self.cache.shape[1], dtype=torch.bool, device="cuda")
        others[ids] = False
        right = torch.equal(got, want[:, :, 0, 0]) and torch.equal(self.cache[:, ids], want)
        if not (gaps and right and bool((self.cache[:, others] == 0xA5).all())):
            raise SwapError(f"{self.shape.name}: wrong bytes")

    def native(self, swap: NativeSwap, direction: Direction, n: int) -> Callable[[], None]:
        """Returns a call that copies n blocks and waits for the end."""
        packed = self.pack(direction, n)

        def copy() -> None:
            ticket = swap.submit(direction, packed)
            while not ticket.wait(10):
                pass

        return copy

    def baseline(self, method: str, direction: Direction, n: int) -> Callable[[], None]:
        """Returns a call that copies n blocks in another way; its tables are made beforehand."""
        number = METHODS[method]
        cache, host = self._tables(n)
        to, source = (host, cache) if direction is OUT else (cache, host)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        kept: list[torch.Tensor] = []  # as long as the copy may be called
        if number in _DEVICE_TABLES:
            kept += [torch.tensor(t, device="cuda", dtype=torch.int64) for t in (to, source)]
            first, second = (t.data_ptr() for t in kept)
        else:
            first, second = (t.buffer_info()[0] for t in (to, source))
        shape = self.shape

        def copy() -> None:
            assert len(to) == len(source)  # also keeps the tables, read by address, alive
            assert len(kept) in (0, 2)
            self._library.baseline(
                number,
                first,
                second,
                len(to),
                shape.piece_bytes,
                shape.num_regions,
                stream.cuda_stream,
            )
            stream.synchronize()

        torch.cuda.synchronize()
        return copy

    def close(self) -> None:
        """Ends the swaps and unpins the memory."""
        self.serving.close()
        self._pinned.close()

    def piece(self, i: int) -> BlockCopy:
        """Returns the i-th random block with its random slot."""
        start = self.slots[i] * self.slot_bytes + HEADER_BYTES
        payload = self._memory[start : start + self.shape.block_bytes]
        return BlockCopy(self.layout.parts[0], [self.ids[i]], 1, 0, payload)

    def _tables(self, n: int) -> tuple[array[int], array[int]]:
        cache, host, base = array("q"), array("q"), address_of(self._memory)
        region, block, *_ = self.cache.stride()
        for i in range(n):
            start = base + self.slots[i] * self.slot_bytes + HEADER_BYTES
            for r in range(self.shape.num_regions):
                cache.append(self.cache.data_ptr() + r * region + self.ids[i] * block)
                host.append(start + r * self.shape.piece_bytes)
        return cache, host


class Contiguous:
    """The limit: one copy of as many bytes between two contiguous buffers."""

    def __init__(self, num_bytes: int) -> None:
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
        self._host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, direction: Direction, num_bytes: int) -> Callable[[], None]:
        device, host = self._device[:num_bytes], self._host[:num_bytes]
        to, source = (host, device) if direction is OUT else (device, host)

        def copy() -> None:
            with torch.cuda.stream(self._stream):
                to.copy_(source, non_blocking=True)
            self._stream.synchronize()

        return copy
