"""HostPages: SGLang's host pool as pdstore copies it, a page as it lies there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pdstore.adapters.sglang.server import VERSIONS, ServedModel
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.layout import LayerSpec, Layout

_MHA, _MLA = "MHATokenToKVPoolHost", "MLATokenToKVPoolHost"
_LAYOUTS = {
    _MHA: ("layer_first", "page_first", "page_first_direct", "page_head"),
    _MLA: ("layer_first", "page_first", "page_first_direct"),
}


@dataclass(frozen=True)
class HostPages:
    """The pages of one rank's host pool.

    A page is stored as it lies in the pool: the bytes of K, then those of V; of MLA, the latents.
    So each half of it is one copy, except in the layout `layer_first`, where each layer is one.

    model: what must be equal on P and D, for the namespace.
    copied: the same pages as `KVPool` copies them: bytes, each contiguous piece as a layer.
    caches: a tensor for each piece, [pages, tokens, 1, bytes of a token]; views of the host pool.
    """

    model: Layout
    copied: Layout
    caches: list[torch.Tensor]

    @classmethod
    def of(cls, pool: Any, served: ServedModel, tp_rank: int, tp_size: int) -> HostPages:
        """Returns the pages of SGLang's host pool. Raises ConfigError for one of another kind."""
        kind = type(pool).__name__
        if pool.layout not in _LAYOUTS.get(kind, ()):
            raise ConfigError(
                f"pdstore does not support the host pool {kind} with the layout {pool.layout}: of"
                f" SGLang {VERSIONS} it serves full attention and MLA, and for"
                f" --hicache-mem-layout {', '.join(_LAYOUTS[_MHA])}"
            )
        if kind == _MLA:  # every rank has all of it, and one of them saves
            tp_rank, tp_size = 0, 1
            layer = LayerSpec(1, pool.kv_cache_dim, value_dim=0, kind="mla")
        else:
            layer = LayerSpec(pool.head_num * tp_size, pool.head_dim)
        halves = [pool.kv_buffer] if kind == _MLA else [pool.kv_buffer[0], pool.kv_buffer[1]]
        if pool.layout == "layer_first":
            halves = [each for half in halves for each in half]
        caches = [_as_pages(half, pool.size, pool.page_size) for half in halves]
        token_bytes = caches[0].shape[3]
        piece = LayerSpec(tp_size, token_bytes, value_dim=0, kind=layer.kind)

        def layout(dtype: str, layers: list[LayerSpec], rope: str = "") -> Layout:
            return Layout(
                dtype=dtype,
                layers=tuple(layers),
                block_tokens=pool.page_size,
                engine_block_tokens=pool.page_size,
                rope=rope,
                quantization=served.quantization,
                order="page",
                page=f"sglang:{pool.layout}",
                num_shards=tp_size,
                tp_rank=tp_rank,
                tp_size=tp_size,
            )

        model = layout(served.dtype, [layer] * pool.layer_num, served.rope)
        return cls(model, layout("uint8", [piece] * len(caches)), caches)

    def numbers(self, host_indices: torch.Tensor, num_pages: int) -> list[int]:
        """Returns the numbers of pages from SGLang's indices of their tokens.

        host_indices: one for each token, page by page. Raises LayoutError for tokens that are not
        `num_pages` whole pages.
        """
        tokens = self.model.engine_block_tokens
        firsts = host_indices[::tokens]
        if len(host_indices) != num_pages * tokens or bool((firsts % tokens).any()):
            raise LayoutError(f"{len(host_indices)} tokens are not {num_pages} pages of {tokens}")
        numbers: list[int] = (firsts // tokens).tolist()
        return numbers


def _as_pages(half: torch.Tensor, num_tokens: int, page_tokens: int) -> torch.Tensor:
    return half.view(torch.uint8).view(num_tokens // page_tokens, page_tokens, 1, -1)
