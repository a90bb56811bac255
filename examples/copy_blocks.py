"""Copies KV blocks from a paged cache to host memory and back, without a pool.

    python examples/copy_blocks.py [cuda:0]

For an engine that offloads its KV cache by itself: the native engine copies beside a running model,
and torch copies on any device.
"""

from __future__ import annotations

import argparse
import mmap
import sys

import torch

import pdstore
from pdstore.native.library import address_of

BLOCK_TOKENS = 16
SOURCE, TARGET = [3, 11], [7, 0]  # engine blocks


def main(device: str = "cpu") -> None:
    settings = pdstore.read_settings()
    layout = pdstore.Layout.of(
        settings,
        dtype="bfloat16",
        layers=(pdstore.LayerSpec(8, 128),) * 4,
        engine_block_tokens=BLOCK_TOKENS,
        rope="",
    )
    # One tensor for each layer: [blocks, tokens, KV heads, K and V channels].
    shape = (32, BLOCK_TOKENS, 8, 256)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4)]
    swap = pdstore.open_swap(settings, layout, caches)
    for plan in swap.plan():
        print(f"{plan.part}, {plan.num_tokens} tokens: {plan.path}, {plan.why}")

    num_tokens = len(SOURCE) * BLOCK_TOKENS
    sizes = [layout.payload_bytes(part, num_tokens) for part in layout.owned_parts]
    memory = memoryview(mmap.mmap(-1, sum(sizes)))
    registrar = swap.registrar
    if registrar is not None:  # a GPU copies to and from registered memory only
        registrar.register(address_of(memory), len(memory))

    def copies(block_ids: list[int]) -> list[pdstore.BlockCopy]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            pdstore.BlockCopy(part, block_ids, num_tokens, 0, memory[start : start + size])
            for part, start, size in zip(layout.owned_parts, starts, sizes, strict=True)
        ]

    swap.gather(copies(SOURCE))  # paged cache -> host memory
    swap.scatter(copies(TARGET))  # host memory -> other blocks of the paged cache
    for cache in caches:
        if not torch.equal(cache[SOURCE], cache[TARGET]):
            sys.exit("the blocks differ")
    print(f"{len(memory)} bytes to the host and back: the blocks are equal")

    swap.close()
    if registrar is not None:
        registrar.unregister(address_of(memory))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", nargs="?", default="cpu", help="cpu (the default) or cuda:N")
    device = parser.parse_args().device
    if device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"copy_blocks: no GPU for {device!r}: leave it out, and torch copies on the CPU")
    main(device)
