"""PagedCache: the KV cache, layer by layer, and the list of its free blocks."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from examples.mini_engine.state import StateCache
from pdstore import ConfigError

LayerCache: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor, Tensor]

_INT8_MAX = 127
_LEAST_SCALE = 1e-30  # divides a K or V that is all zeros


class PagedCache:
    """KV blocks of all requests.

    A layer is [num_blocks, block_size, num_kv_heads, 2 * head_dim]; the last dimension holds K,
    then V. It starts as zeros, since attention multiplies the slots after a request's end by 0.
    A quantized layer is four tensors: K and V of int8, and the scales of K and of V, one for each
    token and head.

    dtype: of K and V as the model computes them.
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
        *,
        is_quantized: bool = False,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads)

        def empty_layer() -> LayerCache:
            if not is_quantized:
                return torch.zeros(*shape, 2 * head_dim, dtype=dtype, device=device)
            key, value = (
                torch.zeros(*shape, head_dim, dtype=torch.int8, device=device) for _ in "kv"
            )
            return key, value, torch.zeros(shape, device=device), torch.zeros(shape, device=device)

        try:
            layers = [empty_layer() for _ in range(num_layers)]
        except RuntimeError as error:
            raise ConfigError(f"--num-blocks {num_blocks}: {error}") from error
        self.layers: list[LayerCache] = layers
        self.states = states
        self.device = torch.device(device)
        self._dtype = dtype
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def slots_of(self, block_table: Tensor, positions: Tensor) -> Tensor:
        """Returns the slots of tokens in a layer, counted over all blocks."""
        block_ids = block_table[positions // self.block_size]
        return block_ids * self.block_size + positions % self.block_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes K and V of tokens, each [tokens, kv heads, dim], into their slots."""
        cache = self.layers[layer]
        if isinstance(cache, Tensor):
            cache.flatten(0, 1)[slots] = torch.cat([key, value], dim=-1)
            return
        keys, values, key_scales, value_scales = cache
        for written, numbers, scales in ((key, keys, key_scales), (value, values, value_scales)):
            numbers.flatten(0, 1)[slots], scales.flatten(0, 1)[slots] = _quantized(written)

    def read(self, layer: int, tables: Tensor) -> Tensor:
        """Returns K and V of all tokens of block tables: [..., tokens, kv heads, 2 * dim]."""
        cache = self.layers[layer]
        if isinstance(cache, Tensor):
            return cache[tables].flatten(-4, -3)
        keys, values, key_scales, value_scales = (tensor[tables] for tensor in cache)
        both = keys * key_scales[..., None], values * value_scales[..., None]
        return torch.cat(both, dim=-1).to(self._dtype).flatten(-4, -3)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks and returns their ids; None if there are not enough."""
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, block_ids: list[int]) -> None:
        """Takes blocks back. The caller makes sure that nothing reads or writes them any more."""
        self._free.extend(reversed(block_ids))


def _quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [tokens, heads, dim] as int8, and the scale of each token and head."""
    numbers = numbers.float()
    scales = numbers.abs().amax(dim=-1) / _INT8_MAX
    return (numbers / scales.clamp(min=_LEAST_SCALE)[..., None]).round().to(torch.int8), scales
