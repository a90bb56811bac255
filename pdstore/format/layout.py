"""Layout: layers, KV groups, shards and payload order of one model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch

from pdstore.errors import LayoutError
from pdstore.format.layer_spec import LayerSpec
from pdstore.format.namespace import Namespace, Part
from pdstore.format.namespace_fields import namespace_fields
from pdstore.settings import Settings

NO_BLOCK = -1
"""In a block table: the engine holds no block there (the window has moved on)."""

BlockTables: TypeAlias = Sequence[Sequence[int]]

MAX_RANGES = 4
RANGE_BYTES = 1 << 20
"""Bounds of the default: a block has at most four layer ranges, of 1 MiB or more each."""

Order = Literal["token", "head", "page"]


@dataclass(frozen=True)
class Layout:
    """The KV cache of one model on one rank, and how its blocks are stored.

    `Layout.of` fills in what the settings say.

    dtype: torch's name of the cache's element type.
    layers: one LayerSpec per layer, in order; equal specs of one layer range form one KV group.
    block_tokens: tokens of a stored block, a multiple of `engine_block_tokens`.
    engine_block_tokens: tokens of a block in the engine's paged cache.
    rope: canonical text of the rope configuration.
    order: payload order, token-major `[layer][token][head][K|V]`, head-major
      `[layer][head][token][K|V]`, or `[layer][head][page]`: an engine's block of one head as it
      is, for engines that pack tokens in ways of their own. Then a tail is a whole page too.
    page: how such an engine packs a page, in words; a namespace field.
    num_shards: shards by KV heads of each group (MLA groups have one), a multiple of `tp_size`.
    draft_layers: how many of the last layers belong to a draft model (MTP, EAGLE).
    num_ranges: how many runs of layers a block is stored in, as even as they can be. P stores the
      values of one range while the model computes the next.

    Raises LayoutError for numbers that do not fit together.
    """

    dtype: str
    layers: tuple[LayerSpec, ...]
    block_tokens: int
    engine_block_tokens: int
    rope: str
    quantization: str | None = None
    order: Order = "token"
    page: str | None = None
    num_shards: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    draft_layers: int = 0
    num_ranges: int = 1

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        dtype: str,
        layers: Sequence[LayerSpec],
        engine_block_tokens: int,
        rope: str,
        quantization: str | None = None,
        page: str | None = None,
        gives_back: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        draft_layers: int = 0,
    ) -> Layout:
        """Returns the layout with block size, order, shards and layer ranges from the settings.

        With `page` given the order is that of pages. Then, and for an engine that `gives_back`
        blocks behind a sliding window, the pool's block is the engine's: a larger one would reach
        over the window's edge.
        """
        layers = tuple(layers)
        is_engines = gives_back or page is not None
        if page is not None:
            _check_pages_are_shared(settings)
        layout = cls(
            dtype=dtype,
            layers=layers,
            block_tokens=engine_block_tokens if is_engines else settings.block_tokens,
            engine_block_tokens=engine_block_tokens,
            rope=rope,
            quantization=quantization,
            order=settings.order if page is None else "page",
            page=page,
            num_shards=settings.kv_shards or tp_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            draft_layers=draft_layers,
        )
        wanted = settings.layer_ranges or min(MAX_RANGES, layout.block_bytes // RANGE_BYTES)
        return replace(layout, num_ranges=max(1, min(wanted, len(layers))))

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("a layout needs at least one layer")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise LayoutError(f"{self.dtype!r} is no torch dtype")
        if (self.order == "page") != (self.page is not None):
            raise LayoutError("the order is that of pages if, and only if, `page` says how")
        if self.block_tokens % self.engine_block_tokens or (
            self.order == "page" and self.block_tokens != self.engine_block_tokens
        ):
            raise LayoutError(
                f"PDSTORE_BLOCK_TOKENS={self.block_tokens} must be a multiple of the engine's block"
                f" of {self.engine_block_tokens} tokens"
            )
        if self.num_shards % self.tp_size or not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(
                f"PDSTORE_KV_SHARDS={self.num_shards} must be a multiple of the TP size"
                f" {self.tp_size}, and rank {self.tp_rank} below it"
            )
        self._check_splits()

    def _check_splits(self) -> None:
        """Raises LayoutError for layers and heads that do not split as asked."""
        if not 1 <= self.num_ranges <= len(self.layers):
            raise LayoutError(f"{len(self.layers)} layers do not make {self.num_ranges} ranges")
        for spec in self.layers:
            if spec.kind != "mla" and spec.num_kv_heads % self.num_shards:
                raise LayoutError(
                    f"{spec.num_kv_heads} KV heads do not split into {self.num_shards} shards:"
                    " PDSTORE_KV_SHARDS and the TP size must divide them (KV heads that several"
                    " ranks hold copies of are not supported)"
                )

    @cached_property
    def itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a whole block: all layers, all KV heads."""
        per_token = sum(spec.num_kv_heads * spec.channels for spec in self.layers)
        return self.block_tokens * per_token * self.itemsize

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layer numbers of each KV group; groups in order of their first layer.

        A group's layers are of one range, and those of a range come before those of the next.
        """
        groups: dict[tuple[int, LayerSpec], list[int]] = {}
        for number, spec in enumerate(self.layers):
            groups.setdefault((self.range_of(number), spec), []).append(number)
        return tuple(tuple(numbers) for numbers in groups.values())

    def range_of(self, layer: int) -> int:
        """Returns the layer range that a layer belongs to, counted from 0."""
        return layer * self.num_ranges // len(self.layers)

    def range_of_part(self, part: Part) -> int:
        """Returns the layer range that a part's layers belong to."""
        return self.range_of(self.groups[part.group][0])

    def num_whole_ranges(self, num_layers: int) -> int:
        """Returns how many layer ranges are complete once the first `num_layers` are computed."""
        if num_layers >= len(self.layers):
            return self.num_ranges
        return self.range_of(num_layers)

    @cached_property
    def num_tables(self) -> int:
        """Block tables of a request."""
        return 1 + max(spec.table for spec in self.layers)

    @cached_property
    def has_windows(self) -> bool:
        """True if any layer has a window, so that block tables may lack blocks."""
        return any(spec.window for spec in self.layers)

    def has_window(self, table: int) -> bool:
        """True if a block table may hold fewer blocks than a prompt has."""
        return any(spec.table == table and spec.window for spec in self.layers)

    def table_of(self, part: Part) -> int:
        """Returns the number of the block table that names a part's blocks."""
        return self._spec(part.group).table

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All values of one block, over all ranks, in key order."""
        return tuple(Part(g, s) for g in range(len(self.groups)) for s in range(self.shards_of(g)))

    @cached_property
    def owned_parts(self) -> tuple[Part, ...]:
        """The parts that this rank saves and loads; an MLA group belongs to every rank."""
        mine = self.owned_shards
        return tuple(p for p in self.parts if p.shard in mine or self.shards_of(p.group) == 1)

    @cached_property
    def grid_shards(self) -> int:
        """Shards of a whole block: 1 when all groups are MLA, whatever the TP size."""
        return max(self.shards_of(group) for group in range(len(self.groups)))

    @cached_property
    def owned_shards(self) -> range:
        """The shards that this rank marks in a hand-off, because all their parts are its own."""
        if self.grid_shards == 1:
            return range(1)
        per_rank = self.num_shards // self.tp_size
        return range(self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank)

    def shards_of(self, group: int) -> int:
        return 1 if self._spec(group).kind == "mla" else self.num_shards

    def local_heads(self, layer: int) -> int:
        """Returns the number of KV heads of a layer in this rank's cache."""
        spec = self.layers[layer]
        return spec.num_kv_heads if spec.kind == "mla" else spec.num_kv_heads // self.tp_size

    def heads_of(self, part: Part) -> range:
        """Returns which of this rank's heads are in a part that it owns."""
        count = self._spec(part.group).num_kv_heads // self.shards_of(part.group)
        first = part.shard * count % self.local_heads(self.groups[part.group][0])
        return range(first, first + count)

    def payload_bytes(self, part: Part, num_tokens: int) -> int:
        """Returns the bytes of one part of a block of `num_tokens` tokens."""
        spec = self._spec(part.group)
        if self.order == "page":
            num_tokens = -(-num_tokens // self.block_tokens) * self.block_tokens
        heads = spec.num_kv_heads // self.shards_of(part.group)
        return len(self.groups[part.group]) * num_tokens * heads * spec.channels * self.itemsize

    @cached_property
    def cells(self) -> Layout:
        """The layout as block copies see it: a page is one token of that many channels."""
        if self.order != "page":
            return self
        layers = [
            replace(spec, head_dim=spec.channels * self.block_tokens, value_dim=0)
            for spec in self.layers
        ]
        return replace(
            self,
            layers=tuple(layers),
            block_tokens=1,
            engine_block_tokens=1,
            order="token",
            page=None,
        )

    def cells_of(self, num_tokens: int) -> int:
        """Returns the number of tokens that block copies see in a block of `num_tokens` tokens."""
        return 1 if self.order == "page" else num_tokens

    @cached_property
    def largest_payload_bytes(self) -> int:
        return max(self.payload_bytes(part, self.block_tokens) for part in self.owned_parts)

    def namespace(self, settings: Settings, *, weights: str) -> Namespace:
        """Returns the namespace of an instance with this layout.

        weights: the weights' revision (`pdstore.weights_revision`).
        """
        fields = namespace_fields(self, settings, weights)
        windows = {
            group: window
            for group in range(len(self.groups))
            if (window := self._spec(group).window) is not None
        }
        return Namespace(
            fields,
            self.parts,
            self.block_tokens,
            settings.hash,
            num_shards=self.grid_shards,
            windows=windows,
        )

    def _spec(self, group: int) -> LayerSpec:
        return self.layers[self.groups[group][0]]


def _check_pages_are_shared(settings: Settings) -> None:
    """Raises LayoutError if tenants are kept apart, because pages would tell one of another."""
    if settings.salt is not None:
        raise LayoutError(
            "PDSTORE_SALT keeps tenants apart, and this engine's pages are stored whole, with"
            " what an earlier request left in them: they cannot be used together"
        )
