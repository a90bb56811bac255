"""LayerSpec: one attention layer of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer of the whole model (not of one rank).

    num_kv_heads: KV heads; 1 for MLA.
    head_dim: elements of K per head and token; for MLA the latent with its rope part.
    value_dim: elements of V; None means as many as K, 0 means none (MLA).
    window: tokens of a sliding window; None for full attention.
    table: which of the engine's block tables names its blocks, for engines with several.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    kind: Literal["full", "sliding", "mla"] = "full"
    window: int | None = None
    table: int = 0

    @property
    def channels(self) -> int:
        """Elements of K and V together, per head and token."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)
