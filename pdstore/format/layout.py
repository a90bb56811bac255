"""Layout: layers, KV groups, shards and payload order of one model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal, TypeAlias

import torch

from pdstore.format.layer_groups import groups_of, range_of
from pdstore.format.layer_spec import LayerSpec
from pdstore.format.layout_check import check_layout, check_pages_are_shared
from pdstore.format.namespace import Namespace, Part
from pdstore.format.namespace_fields import namespace_fields
from pdstore.format.pipeline import Pipeline
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
    layers: one LayerSpec per layer of the whole model, in order; equal specs of one layer range
      form one KV group.
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
    pipeline: the stages of pipeline-parallel ranks; None if each rank holds all layers.

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
    pipeline: Pipeline | None = None

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
        pipeline: Pipeline | None = None,
    ) -> Layout:
        """Returns the layout with block size, order, shards and layer ranges from the settings.

        With `page` given the order is that of pages. Then, and for an engine that `gives_back`
        blocks behind a sliding window, the pool's block is the engine's: a larger one would reach
        over the window's edge.
        """
        if page is not None:
            check_pages_are_shared(settings)
        layout = cls(
            dtype=dtype,
            layers=tuple(layers),
            block_tokens=engine_block_tokens if gives_back or page else settings.block_tokens,
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
        return replace(layout, num_ranges=max(1, min(wanted, len(layers))), pipeline=pipeline)

    def __post_init__(self) -> None:
        check_layout(self)

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
        """The layer numbers of each KV group, over all ranks; groups in order of first layers."""
        return groups_of(self.layers, self.num_ranges)

    @cached_property
    def held_layers(self) -> tuple[int, ...]:
        """The numbers of the layers in this rank's cache, in the cache's order."""
        return tuple(range(len(self.layers))) if self.pipeline is None else self.pipeline.layers

    @cached_property
    def held_ranges(self) -> tuple[int, ...]:
        """The layer ranges that have layers in this rank's cache, in order."""
        return tuple(dict.fromkeys(self.range_of(layer) for layer in self.held_layers))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1 without one."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    def range_of(self, layer: int) -> int:
        """Returns the layer range that a layer belongs to, counted from 0."""
        return range_of(layer, len(self.layers), self.num_ranges)

    def range_of_part(self, part: Part) -> int:
        """Returns the layer range that a part's layers belong to."""
        return self.range_of(self.groups[part.group][0])

    def num_whole_ranges(self, num_layers: int) -> int:
        """Returns how many `held_ranges` are complete once the first layers held are computed."""
        if num_layers >= len(self.held_layers):
            return len(self.held_ranges)
        return self.held_ranges.index(self.range_of(self.held_layers[num_layers]))

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
        """The parts that this rank saves and loads; an MLA group belongs to its whole stage."""
        shards, layers = self.owned_shards, set(self.held_layers)
        return tuple(
            part
            for part in self.parts
            if self.groups[part.group][0] in layers
            and (part.shard in shards or self.shards_of(part.group) == 1)
        )

    @cached_property
    def grid_shards(self) -> int:
        """Shards of a whole block: 1 when all groups are MLA, whatever the TP size."""
        return max(self.shards_of(group) for group in range(len(self.groups)))

    @cached_property
    def owned_shards(self) -> range:
        """The shards that this rank marks in a hand-off: it has all parts of them in its stage."""
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
        salt = settings.salt.get_secret_value() if settings.salt else ""
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
            bare_salt=sha256(salt.strip().encode()).hexdigest() if salt != salt.strip() else None,
        )

    def _spec(self, group: int) -> LayerSpec:
        return self.layers[self.groups[group][0]]
