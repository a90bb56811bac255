"""BlockRefs: keeps engine blocks from being reused while a save has still to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class BlockRefs:
    """References to blocks of vLLM's pool, one set for each save; they outlive the request.

    Only the scheduler's thread calls it.

    block_pool: vLLM's BlockPool, whose reference counts are raised.
    num_ranks: how many workers must release a save before its blocks are freed.
    """

    def __init__(self, block_pool: Any, num_ranks: int) -> None:
        self._pool = block_pool
        self._num_ranks = num_ranks
        self._held: dict[int, tuple[list[Any], int]] = {}

    def hold(self, number: int, block_ids: Iterable[int]) -> None:
        """Takes a reference to each of these blocks for the save of this number."""
        blocks = [self._pool.blocks[id] for id in dict.fromkeys(block_ids)]
        self._pool.touch(blocks)
        self._held[number] = (blocks, self._num_ranks)

    def release(self, released: Mapping[int, int]) -> None:
        """Counts the ranks that released each save; the last one frees the save's blocks."""
        for number, count in released.items():
            held = self._held.pop(number, None)
            if held is None:
                continue
            blocks, left = held[0], held[1] - count
            if left > 0:
                self._held[number] = (blocks, left)
            else:
                self._pool.free_blocks(reversed(blocks))

    def __len__(self) -> int:
        """Returns how many saves hold blocks."""
        return len(self._held)
