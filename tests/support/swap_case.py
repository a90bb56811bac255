"""A small paged cache in one poisoned buffer, and copies of its blocks: for tests of the swap."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdstore.errors import Direction
from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout
from pdstore.native.library import CopyPath, address_of
from pdstore.worker.swap.base import BlockCopy, TorchSwap
from pdstore.worker.swap.native import NativeSwap
from tests.support.kv import flat_layout

POISON = 0xA5
SIZES = ("copy_out_bytes", "copy_in_bytes", "stage_out_bytes", "stage_in_bytes")
GUARD = 64  # bytes around each payload that nobody may touch


def host_memory(num_bytes: int, device: str) -> torch.Tensor:
    memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
    return memory.pin_memory() if device != "cpu" else memory


def view_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


@dataclass
class Case:
    """A layout with caches in one poisoned buffer, so that gaps can be compared too."""

    layout: Layout
    num_blocks: int
    buffer: torch.Tensor
    caches: list

    @classmethod
    def of(cls, layout, num_blocks, device, *, split, heads_outer, pad, offset, seed=0) -> Case:
        shapes = []
        whole = []
        at = offset
        itemsize = layout.identity.itemsize
        for n, cells in layout.geometry.caches.items():
            spec = layout.identity.layers[n]
            if spec.form is not None:  # of any length in bytes, and with a gap behind it
                row = -(-spec.channels // itemsize) + pad
                whole.append((n, at * itemsize, row * itemsize, spec.channels))
                at += num_blocks * row
                continue
            widths = [spec.head_dim, spec.channels - spec.head_dim] if split else [spec.channels]
            pieces = [(width, cells.dtype) for width in filter(None, widths)]
            for width, dtype in pieces + [(1, each) for each in cells.scales]:
                size = getattr(torch, dtype).itemsize
                start = -(-at * itemsize // size)
                heads, tokens = cells.num_heads, cells.entry_tokens
                inner = width + (pad if pad % 2 else 0)
                strides = (
                    (tokens * heads * inner + pad, inner, tokens * inner, 1)
                    if heads_outer
                    else (tokens * heads * inner + pad, heads * inner, inner, 1)
                )
                shapes.append((n, dtype, start, (num_blocks, tokens, heads, width), strides))
                at = -(-(start + num_blocks * strides[0] + pad) * size // itemsize)
        generator = torch.Generator().manual_seed(seed)
        num_bytes = -(-at * itemsize // 8) * 8  # elements of every type
        bytes_ = torch.randint(0, 256, (num_bytes,), generator=generator)
        buffer = bytes_.to(torch.uint8).to(device)
        layers: list[list[torch.Tensor]] = [[] for _ in layout.geometry.caches]
        for n, dtype, start, shape, strides in shapes:
            flat = buffer.view(getattr(torch, dtype))
            layers[n].append(torch.as_strided(flat, shape, strides, start))
        for n, start, stride, width in whole:
            layers[n].append(torch.as_strided(buffer, (num_blocks, width), (stride, 1), start))
        caches = [tuple(t) if len(t) > 1 else t[0] for t in layers]
        return cls(layout, num_blocks, buffer, caches)

    def copies(self, ids_of_blocks, num_tokens, host, first_token=0, parts=None):
        """Returns a copy per part and pool block, each with a guard around its payload.

        The state at a block's end is in the first of its engine blocks.
        """
        copies, at = [], GUARD
        for ids in ids_of_blocks:
            for part in parts or self.layout.owned_parts:
                size = self.layout.payload_bytes(part, num_tokens)
                cache = self.layout.geometry.parts[part].cache
                used = ids if cache.cell_tokens else ids[:1]
                cells, before = cache.num_cells(num_tokens), cache.cells_before(first_token)
                copies.append(BlockCopy(part, used, cells, before, host[at : at + size]))
                at += size + GUARD
        return copies

    def host_bytes(self, num_blocks) -> int:
        size = sum(
            self.layout.payload_bytes(p, self.layout.block_tokens) + GUARD
            for p in self.layout.owned_parts
        )
        return GUARD + num_blocks * size


def native_of(library, case, device, **options) -> NativeSwap:
    return NativeSwap(library, case.layout, case.caches, **options)


def layout_of(**changes) -> Layout:
    return flat_layout(
        **{
            "dtype": "bfloat16",
            "rope": "",
            "layers": (LayerSpec(4, 64),) * 4,
            "block_tokens": 32,
            "engine_block_tokens": 16,
            **changes,
        }
    )


PLAIN = {"split": False, "heads_outer": False, "pad": 0, "offset": 0}


class SwapBench:
    """A native swap with host memory for two pool blocks per save or load."""

    def __init__(self, library, device, path=CopyPath.AUTO, slice_bytes=4096) -> None:
        layout = layout_of(layers=(LayerSpec(2, 32),) * 4)
        self.case = Case.of(layout, 40, device, **PLAIN)
        sizes = dict.fromkeys(SIZES, slice_bytes)
        self.swap = NativeSwap(library, layout, self.case.caches, path=path, sizes=sizes)
        self.tables = [[2 * i, 2 * i + 1] for i in range(8)]
        self.host = host_memory(self.case.host_bytes(8), device)
        self.swap.add_host(address_of(view_of(self.host)), len(self.host))
        self.copies = self.case.copies(self.tables, 32, view_of(self.host))
        want = host_memory(len(self.host), "cpu")
        TorchSwap(layout, self.case.caches).gather(self.case.copies(self.tables, 32, view_of(want)))
        self.want = want

    def copy_works(self, direction) -> bool:
        self.host.fill_(0xA5) if direction is Direction.SAVE else self.host.copy_(self.want)
        self.copy(direction)
        return torch.equal(self.host, self.want)

    def copy(self, direction) -> None:
        verb = self.swap.gather if direction is Direction.SAVE else self.swap.scatter
        verb(self.copies)
