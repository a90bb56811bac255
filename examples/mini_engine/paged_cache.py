"""PagedCache: the KV cache, one tensor per layer, and the list of its free blocks."""

from __future__ import annotations

import torch

from examples.mini_engine.state import StateCache
from pdstore import ConfigError


class PagedCache:
    """KV blocks of all requests.

    A layer is [num_blocks, block_size, num_kv_heads, 2 * head_dim]; the last dimension holds K,
    then V. It starts as zeros, since attention multiplies the slots after a request's end by 0.

    states: the requests' states, of a model that has them.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        states: StateCache | None = None,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, 2 * head_dim)
        try:
            layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except RuntimeError as error:
            raise ConfigError(f"--num-blocks {num_blocks}: {error}") from error
        self.layers = layers
        self.states = states
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def slots_of(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the slots of tokens in a layer, counted over all blocks."""
        block_ids = block_table[positions // self.block_size]
        return block_ids * self.block_size + positions % self.block_size

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks and returns their ids; None if there are not enough."""
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, block_ids: list[int]) -> None:
        """Takes blocks back. The caller makes sure that nothing reads or writes them any more."""
        self._free.extend(reversed(block_ids))
