"""BlockRefs: holds engine blocks for saves, whatever becomes of their requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class BlockRefs:
    """References to blocks of vLLM's pool, one set for each save. For the scheduler's thread.

    block_pool: vLLM's BlockPool; its reference counts keep a block from being given to another
      request while a save has still to read it.
    num_ranks: how many workers must have released a save.
    """

    def __init__(self, block_pool: Any, num_ranks: int) -> None:
        self._pool = block_pool
        self._num_ranks = num_ranks
        self._held: dict[int, tuple[list[Any], int]] = {}

    def hold(self, number: int, block_ids: Iterable[int]) -> None:
        blocks = [self._pool.blocks[id] for id in dict.fromkeys(block_ids)]
        self._pool.touch(blocks)
        self._held[number] = (blocks, self._num_ranks)

    def release(self, released: Mapping[int, int]) -> None:
        """Counts ranks that are done with saves; frees the blocks with the last of them."""
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
        """Saves that hold blocks."""
        return len(self._held)
