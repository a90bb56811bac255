"""Layout: layers, KV groups, shards, stages and payload order of one model on one rank."""

# Decision: docs/decisions/006-layer-ranges.md
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal

import torch

from pdstore.errors import LayoutError
from pdstore.format.continuation import Continuation, needs_of
from pdstore.format.geometry import PartGeometry
from pdstore.format.keys import FORMAT_VERSION, Json, Namespace, Part
from pdstore.settings import MAX_LAYER_RANGES, Settings

MAX_RANGES = 4
RANGE_BYTES = 1 << 20
"""Limits without PDSTORE_LAYER_RANGES: at most four layer ranges, of 1 MiB or more on average."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer of the whole model (not of one rank).

    num_kv_heads: KV heads; 1 for MLA.
    head_dim: elements of K per head and token; for MLA, elements of the latent and its rope part.
    value_dim: elements of V per head and token; None: as many as K has; 0: V is not stored (MLA).
    window: the length of a sliding window in tokens; None for full attention.
    table: the number of the engine's block table that names this layer's blocks.
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


@dataclass(frozen=True)
class Pipeline:
    """The pipeline stage of each layer, and the stage of this rank.

    Stages are no part of the namespace, so P and D may have different stages. Therefore no value
    may hold layers of two stages: every KV group must lie within one stage.

    stage_of: the number of each layer's stage, for the layers in the order of `Layout.layers`.
    stage: the number of this rank's stage, counted from 0.
    """

    stage_of: tuple[int, ...]
    stage: int

    @property
    def num_stages(self) -> int:
        return 1 + max(self.stage_of)


@dataclass(frozen=True)
class Layout:
    """The shape of one model's KV cache on one rank, and the form of its stored blocks.

    `Layout.of` takes block size, shards and layer ranges from the settings.

    dtype: the name of the cache's element type in torch.
    layers: one LayerSpec per layer of the whole model, in order; equal specs of one layer range
      form one KV group.
    block_tokens: tokens of a stored block, a multiple of `engine_block_tokens`.
    engine_block_tokens: tokens of a block in the engine's paged cache.
    rope: the text that `shaping` makes of the model's configuration.
    page: None for token-major payloads, `[layer][token][head][K|V]`. For an engine that packs
      tokens in its own way, a text that names this way, a namespace field. Payloads are then
      `[layer][head][page]`: one head of an engine block as it lies in memory, for a tail too.
    num_shards: the number of shards that the KV heads of a group are split into, a multiple of
      `tp_size`; an MLA group always has one shard.
    draft_layers: the number of layers, at the end, that belong to a draft model (MTP, EAGLE).
    num_ranges: the number of layer ranges that the layers are split into, as evenly as possible.
      P can store one range while the model computes the next range.
    pipeline: the stages of pipeline-parallel ranks; None if each rank holds all layers.
    items: how keys name images, sounds and videos, a namespace field; None for a model of text.
    num_pieces: None, or with `page` the number of equal pieces that each of the engine's pages is.
      A payload is then the page as it lies in memory, with all layers and heads of this rank: piece
      after piece. All layers must then be equal.

    Raises LayoutError for numbers that do not fit together.
    """

    dtype: str
    layers: tuple[LayerSpec, ...]
    block_tokens: int
    engine_block_tokens: int
    rope: str
    quantization: str | None = None
    page: str | None = None
    num_shards: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    draft_layers: int = 0
    num_ranges: int = 1
    pipeline: Pipeline | None = None
    items: str | None = None
    num_pieces: int | None = None

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
        items: str | None = None,
    ) -> Layout:
        """Returns the layout with block size, shards and layer ranges from the settings.

        A stored block is one engine block if `page` is given. It is also one if a layer does not
        need all earlier tokens and the engine `gives_back` (frees) blocks that no layer needs: a
        larger block could then lie partly behind a sliding window.
        """
        if page is not None and settings.salt is not None:
            raise LayoutError(
                "PDSTORE_SALT keeps tenants apart, and this engine's pages are stored whole, with"
                " what an earlier request left in them: they cannot be used together"
            )
        has_gaps = gives_back and any(spec.window for spec in layers)
        layout = cls(
            dtype=dtype,
            layers=tuple(layers),
            block_tokens=engine_block_tokens if has_gaps or page else settings.block_tokens,
            engine_block_tokens=engine_block_tokens,
            rope=rope,
            quantization=quantization,
            page=page,
            num_shards=settings.kv_shards or tp_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            draft_layers=draft_layers,
            items=items,
        )
        wanted = settings.layer_ranges or min(MAX_RANGES, layout.block_bytes // RANGE_BYTES)
        return replace(layout, num_ranges=max(1, min(wanted, len(layers))), pipeline=pipeline)

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("a layout needs at least one layer")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise LayoutError(f"{self.dtype!r} is no torch dtype")
        if self.block_tokens % self.engine_block_tokens or (
            self.page is not None and self.block_tokens != self.engine_block_tokens
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
        if self.num_pieces is not None and (self.page is None or len(self.groups) > 1):
            raise LayoutError("only pages of equal layers, in one layer range, are in pieces")
        _check_splits(self)

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
        """The layer numbers of each KV group of the whole model; see `groups_of` for the order."""
        return groups_of(self.layers, self.num_ranges)

    @cached_property
    def held_layers(self) -> tuple[int, ...]:
        """The numbers of the layers in this rank's cache, in the cache's order."""
        pipeline, every = self.pipeline, range(len(self.layers))
        return tuple(n for n in every if pipeline is None or pipeline.stage_of[n] == pipeline.stage)

    @cached_property
    def held_ranges(self) -> tuple[int, ...]:
        """The layer ranges that have layers in this rank's cache, in order."""
        return tuple(dict.fromkeys(self.range_of(layer) for layer in self.held_layers))

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    def range_of(self, layer: int) -> int:
        """Returns the layer range that a layer belongs to, counted from 0."""
        return range_of(layer, len(self.layers), self.num_ranges)

    @cached_property
    def parts_of(self) -> Mapping[int | None, Sequence[Part]]:
        """The owned parts of each layer range; None: of all layers."""
        made: dict[int | None, list[Part]] = {None: [*self.owned_parts]}
        for part in self.owned_parts:
            made.setdefault(self.range_of(self.groups[part.group][0]), []).append(part)
        return made

    def num_whole_ranges(self, num_layers: int) -> int:
        """Returns how many `held_ranges` end within the first `num_layers` of `held_layers`."""
        if num_layers >= len(self.held_layers):
            return len(self.held_ranges)
        return self.held_ranges.index(self.range_of(self.held_layers[num_layers]))

    @cached_property
    def num_tables(self) -> int:
        """The number of block tables that each request has."""
        return 1 + max(spec.table for spec in self.layers)

    @cached_property
    def continuation(self) -> Continuation:
        """Which blocks of each block table must be there for an engine to go on at a token."""
        needs = needs_of((spec.table, spec.window) for spec in self.layers)
        return Continuation(self.block_tokens, needs, self.block_tokens // self.engine_block_tokens)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts of one block, of all ranks, in the order of their keys."""
        return tuple(Part(g, s) for g in range(len(self.groups)) for s in range(self.shards_of(g)))

    @cached_property
    def owned_parts(self) -> tuple[Part, ...]:
        """The parts that this rank saves and loads; all ranks of a stage own its MLA groups."""
        shards, layers = self.owned_shards, set(self.held_layers)
        return tuple(
            part
            for part in self.parts
            if self.groups[part.group][0] in layers
            and (part.shard in shards or self.shards_of(part.group) == 1)
        )

    @cached_property
    def grid_shards(self) -> int:
        """The number of shards of a block; 1 if all KV groups are MLA, whatever the TP size."""
        return max(self.shards_of(group) for group in range(len(self.groups)))

    @cached_property
    def owned_shards(self) -> range:
        """The shards for which this rank stores `done`: it owns all their parts in its stage."""
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
        """Returns the range of this rank's heads that a part holds; the rank must own the part."""
        count = self._spec(part.group).num_kv_heads // self.shards_of(part.group)
        first = part.shard * count % self.local_heads(self.groups[part.group][0])
        return range(first, first + count)

    def payload_bytes(self, part: Part, num_tokens: int) -> int:
        """Returns the payload's length in bytes for one part of a block of `num_tokens` tokens."""
        return self.geometry[part].payload_bytes(num_tokens)

    @cached_property
    def geometry(self) -> Mapping[Part, PartGeometry]:
        """The cells of each part: a packed page is one cell, else each token is one."""
        return {part: self._geometry_of(part) for part in self.parts}

    def _geometry_of(self, part: Part) -> PartGeometry:
        spec, layers = self._spec(part.group), self.groups[part.group]
        made = PartGeometry.of_tokens(
            layers,
            spec.table,
            self.heads_of(part),
            spec.channels * self.itemsize,
            self.engine_block_tokens,
        )
        if self.num_pieces is not None:
            return made.in_pieces(self.num_pieces)
        return made if self.page is None else made.in_pages()

    @cached_property
    def largest_payload_bytes(self) -> int:
        return max(self.payload_bytes(part, self.block_tokens) for part in self.owned_parts)

    def namespace(self, settings: Settings, *, weights: str) -> Namespace:
        """Returns the namespace of an instance with this layout; it has a digest of the salt.

        weights: the weights' revision (`pdstore.weights_revision`).
        """
        salt = settings.salt.get_secret_value() if settings.salt else ""
        bare = salt.strip()
        fields: dict[str, Json] = {
            "format": FORMAT_VERSION,
            "weights": weights,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "layers": [[s.kind, s.num_kv_heads, s.head_dim, s.channels] for s in self.layers],
            "windows": [spec.window for spec in self.layers],
            "rope": self.rope,
            "block_tokens": self.block_tokens,
            "order": "token" if self.page is None else "page",
            "page": self.page,
            "tables": [spec.table for spec in self.layers],
            "shards": self.grid_shards,
            "draft_layers": self.draft_layers,
            "layer_ranges": self.num_ranges,
            "hash": "sha256",
            "salt": sha256(salt.encode()).hexdigest() if salt else None,
        }
        # without a seal, and for a model of text, no such field: older namespaces stay valid
        if settings.seal_key_file is not None:
            fields["seal"] = "aes-256-gcm"
        if self.items is not None:
            fields["items"] = self.items
        return Namespace(
            fields,
            self.parts,
            self.block_tokens,
            num_shards=self.grid_shards,
            needs=needs_of((n, self._spec(n).window) for n in range(len(self.groups))),
            bare_salt=sha256(bare.encode()).hexdigest() if bare != salt else None,
        )

    def _spec(self, group: int) -> LayerSpec:
        return self.layers[self.groups[group][0]]


def range_of(layer: int, num_layers: int, num_ranges: int) -> int:
    """Returns the range of a layer if the layers are split into ranges as evenly as possible."""
    return layer * num_ranges // num_layers


def groups_of(layers: Sequence[LayerSpec], num_ranges: int) -> tuple[tuple[int, ...], ...]:
    """Returns the layer numbers of each KV group; the groups are sorted by their first layer.

    All layers of a group have equal specs and lie in one layer range. The groups of a range come
    before the groups of the next range.
    """
    groups: dict[tuple[int, LayerSpec], list[int]] = {}
    for number, spec in enumerate(layers):
        at = range_of(number, len(layers), num_ranges)
        groups.setdefault((at, spec), []).append(number)
    return tuple(tuple(numbers) for numbers in groups.values())


def _check_splits(layout: Layout) -> None:
    """Raises LayoutError if the layers do not split into ranges, or the KV heads into shards."""
    layers = layout.layers
    if not 1 <= layout.num_ranges <= len(layers):
        raise LayoutError(f"{len(layers)} layers do not make {layout.num_ranges} ranges")
    for spec in layers:
        if spec.kind != "mla" and spec.num_kv_heads % layout.num_shards:
            raise LayoutError(
                f"{spec.num_kv_heads} KV heads do not split into {layout.num_shards} shards:"
                " PDSTORE_KV_SHARDS and the TP size must divide them (KV heads that several"
                " ranks hold copies of are not supported)"
            )
    if layout.pipeline is not None:
        _check_stages(layout.pipeline, layers, layout.num_ranges)


def _check_stages(pipeline: Pipeline, layers: Sequence[LayerSpec], num_ranges: int) -> None:
    """Raises LayoutError if stages and layers do not match, or if a KV group has two stages."""
    stage_of, num_stages = pipeline.stage_of, pipeline.num_stages
    if len(stage_of) != len(layers) or set(stage_of) != set(range(num_stages)):
        raise LayoutError("each layer has a stage, and each stage of a pipeline has layers")
    if not 0 <= pipeline.stage < num_stages:
        raise LayoutError(f"there is no stage {pipeline.stage} of {num_stages}")

    def fits(num_ranges: int) -> bool:
        """Returns whether each KV group lies in one stage if there are `num_ranges` ranges."""
        groups = groups_of(layers, num_ranges)
        return all(len({stage_of[layer] for layer in group}) == 1 for group in groups)

    if fits(num_ranges):
        return
    counts = ", ".join(str(stage_of.count(stage)) for stage in range(num_stages))
    possible = range(1, min(MAX_LAYER_RANGES, len(layers)) + 1)
    fitting = next((number for number in possible if fits(number)), None)
    remedy = f"no PDSTORE_LAYER_RANGES up to {MAX_LAYER_RANGES} fits them"
    if fitting is not None:
        remedy = f"set PDSTORE_LAYER_RANGES={fitting} on P and on D"
    raise LayoutError(
        f"pipeline stages of {counts} layers do not end where the model's {num_ranges} layer"
        f" ranges end, in which blocks are stored: {remedy}"
    )
