"""Layout: a model's KV on one rank: what identifies it, and what of it lies where."""

# Decision: docs/decisions/006-layer-ranges.md
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from pdstore.errors import LayoutError
from pdstore.format.continuation import Continuation, needs_of, states_of
from pdstore.format.geometry import CacheGeometry, Geometry, PartGeometry
from pdstore.format.identity import Identity, LayerSpec, groups_of
from pdstore.format.keys import Namespace, Part
from pdstore.settings import MAX_LAYER_RANGES, Settings

MAX_RANGES = 4
RANGE_BYTES = 1 << 20
"""Limits without PDSTORE_LAYER_RANGES: at most four layer ranges, of 1 MiB or more on average."""


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
    """The KV of one model on one rank: `identity` names it, and `geometry` says where it lies.

    `Layout.of` takes block size, shards and layer ranges from the settings.

    identity: what is equal on all instances that share blocks.
    engine_block_tokens: the tokens of a block in the engine's paged cache, a divisor of
      `block_tokens`; for each block table (None for one of states), or a single number for all.
    tp_rank, tp_size: each rank has an equal part of the shards; MLA groups are whole on each rank.
    pipeline: the stages of pipeline-parallel ranks; None if each rank holds all layers.
    given: what lies where, from an engine that does not have one cache for each layer; None: as the
      layers say.

    Raises LayoutError for numbers that do not fit together.
    """

    identity: Identity
    engine_block_tokens: int | Sequence[int | None]
    tp_rank: int = 0
    tp_size: int = 1
    pipeline: Pipeline | None = None
    given: Geometry | None = None

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        dtype: str,
        layers: Sequence[LayerSpec],
        engine_block_tokens: int | Sequence[int | None],
        rope: str,
        quantization: str | None = None,
        page: str | None = None,
        boundary_tokens: int | None = None,
        freed_tokens: int | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        pipeline: Pipeline | None = None,
        items: str | None = None,
        speculation: int = 0,
        draft: str = "",
    ) -> Layout:
        """Returns the layout with block size, shards and layer ranges from the settings.

        A stored block is one engine block if `page` is given.

        boundary_tokens: the length of a stored block if the engine decides it: how many tokens lie
          between two ends at which it gives back (frees) blocks behind windows, or keeps states. A
          larger block could lie partly behind a window. None: the engine does neither.
        freed_tokens: the length of the blocks that windows give back, if each of them is several
          engine blocks; None: each is one engine block.
        The other arguments are those of `Identity` and `Layout`.
        """
        entries = entries_of(engine_block_tokens, layers)
        if boundary_tokens is not None:
            _check_boundary(boundary_tokens, freed_tokens, entries, layers)
        engine_block = lcm(*(tokens for tokens in entries if tokens is not None))
        identity = Identity(
            dtype=dtype,
            layers=tuple(layers),
            block_tokens=boundary_tokens or (engine_block if page else settings.block_tokens),
            rope=rope,
            quantization=quantization,
            page=page,
            num_shards=settings.kv_shards or tp_size,
            items=items,
            speculation=speculation,
            draft=draft,
        )
        wanted = settings.layer_ranges or min(MAX_RANGES, identity.block_bytes // RANGE_BYTES)
        most = len(identity.needed_layers)
        identity = replace(identity, num_ranges=max(1, min(wanted, most)))
        _check_salt(settings, identity)
        return cls(identity, entries, tp_rank, tp_size, pipeline)

    def __post_init__(self) -> None:
        _check_blocks(self)
        num_shards = self.identity.num_shards
        if num_shards % self.tp_size or not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(
                f"PDSTORE_KV_SHARDS={num_shards} must be a multiple of the TP size"
                f" {self.tp_size}, and rank {self.tp_rank} below it"
            )
        if num_shards > self.tp_size and any(
            spec.is_state and not spec.is_whole for spec in self.identity.layers
        ):
            raise LayoutError(
                f"one of {self.tp_size} ranks holds several of {num_shards} parts of a state, which"
                " lie in one cell: do not set PDSTORE_KV_SHARDS"
            )
        if self.pipeline is not None:
            _check_stages(self.pipeline, self.identity.layers, self.identity.num_ranges)

    @property
    def block_tokens(self) -> int:
        """The number of tokens in a block of the pool."""
        return self.identity.block_tokens

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that make up one block, of all ranks, in the order of their keys; no drafts."""
        return self.identity.parts

    def namespace(self, settings: Settings, *, weights: str) -> Namespace:
        """Returns `Identity.namespace`: what names the blocks of an instance with this layout."""
        return self.identity.namespace(settings, weights=weights)

    @cached_property
    def held_layers(self) -> tuple[int, ...]:
        """The numbers of the layers in this rank's cache, in the cache's order."""
        every = range(len(self.identity.layers))
        of = self.pipeline
        return tuple(n for n in every if of is None or of.stage_of[n] == of.stage)

    @cached_property
    def held_ranges(self) -> tuple[int, ...]:
        """The layer ranges that have layers in this rank's cache, in order; without the drafts'."""
        needed = (n for n in self.held_layers if not self.identity.layers[n].optional)
        return tuple(dict.fromkeys(map(self.identity.range_of, needed)))

    @cached_property
    def draft_range(self) -> int | None:
        """The layer range of the optional layers in this rank's cache; None if it has none."""
        has_drafts = self.identity.layers[self.held_layers[-1]].optional
        return self.identity.num_ranges if has_drafts else None

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    @cached_property
    def parts_of(self) -> Mapping[int | None, Sequence[Part]]:
        """The owned parts of each layer range. The key None has all parts but those of drafts."""
        drafts = self.identity.drafts
        needed = [part for part in self.owned_parts if part.group not in drafts]
        made: dict[int | None, list[Part]] = {None: needed}
        for part in self.owned_parts:
            first_layer = self.identity.groups[part.group][0]
            made.setdefault(self.identity.range_of(first_layer), []).append(part)
        return made

    def num_whole_ranges(self, num_layers: int) -> int:
        """Returns how many `held_ranges` end within the first `num_layers` of `held_layers`.

        The last one ends with the drafts, so that D, which waits for it alone, finds them stored.
        """
        if num_layers >= len(self.held_layers):
            return len(self.held_ranges)
        at = self.identity.range_of(self.held_layers[num_layers])
        return self.held_ranges.index(at) if at in self.held_ranges else len(self.held_ranges) - 1

    @cached_property
    def owned_parts(self) -> tuple[Part, ...]:
        """The parts that this rank saves and loads; all ranks of a stage own its MLA groups."""
        identity = self.identity
        return tuple(
            part
            for part in identity.all_parts
            if identity.groups[part.group][0] in self.held_layers
            and (part.shard in self._shards or identity.shards_of(part.group) == 1)
        )

    @cached_property
    def owned_shards(self) -> range:
        """The shards for which this rank stores `done`: it owns all their parts in its stage."""
        if self.identity.grid_shards == 1:
            return range(1)
        return self._shards

    @property
    def _shards(self) -> range:
        """The shards of this rank in KV groups that are split."""
        per_rank = self.identity.num_shards // self.tp_size
        return range(self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank)

    def payload_bytes(self, part: Part, num_tokens: int) -> int:
        """Returns the payload's length in bytes for an owned part of a block of `num_tokens`."""
        return self.geometry.parts[part].payload_bytes(num_tokens)

    @cached_property
    def continuation(self) -> Continuation:
        """Which blocks of each block table must be there for an engine to go on at a token."""
        layers = self.identity.layers
        states = states_of((spec.table, spec.is_state) for spec in layers)
        of_tokens = (n for n in range(len(self.geometry.tables)) if n not in states)
        return Continuation(
            self.block_tokens,
            needs_of((spec.table, spec.needs) for spec in layers),
            {table: self.geometry.block_entries(table) for table in of_tokens},
            states,
        )

    @cached_property
    def geometry(self) -> Geometry:
        """Where the layers, heads and tokens of this rank lie, region by region."""
        if self.given is not None:
            return self.given
        tables = entries_of(self.engine_block_tokens, self.identity.layers)
        caches = {layer: self._cache(layer, tables) for layer in self.held_layers}
        parts = {part: self._part(part, caches) for part in self.owned_parts}
        return Geometry(self.block_tokens, tables, caches, parts)

    def _cache(self, layer: int, tables: Sequence[int | None]) -> CacheGeometry:
        """Returns the cells of a layer: a state or a page is one cell, else a token is."""
        identity = self.identity
        spec = identity.layers[layer]
        cell_bytes = spec.cell_bytes(identity.itemsize)
        if spec.form is not None:
            return CacheGeometry.of_blocks(spec.table, spec.cell_tokens, cell_bytes)
        by_token = CacheGeometry(
            table=spec.table,
            entry_tokens=tables[spec.table],
            cell_tokens=1,
            cell_bytes=cell_bytes,
            num_heads=spec.num_kv_heads // (1 if spec.is_whole else self.tp_size),
            dtype=identity.dtype,
            scales=spec.scales_of_cell,
        )
        return by_token if identity.page is None else by_token.in_pages()

    def _part(self, part: Part, caches: Mapping[int, CacheGeometry]) -> PartGeometry:
        layers = self.identity.groups[part.group]
        cache = caches[layers[0]]
        num_shards = self.identity.shards_of(part.group)
        num_heads = self.identity.spec_of(part.group).num_kv_heads // num_shards
        return PartGeometry(layers, cache, part.shard * num_heads % cache.num_heads, num_heads)


def entries_of(
    engine_block_tokens: int | Sequence[int | None], layers: Sequence[LayerSpec]
) -> tuple[int | None, ...]:
    """Returns for each block table of the layers the number of tokens of its entries.

    It is None for a table of states. Raises LayoutError if numbers are given for more or for fewer
    block tables, or if a table has states and tokens.
    """
    num_tables = 1 + max((spec.table for spec in layers), default=0)
    states = {spec.table for spec in layers if spec.is_state}
    if states & {spec.table for spec in layers if not spec.is_state}:
        raise LayoutError(
            "a block table has either states or the KV of tokens: give the layers with states a"
            " table of their own"
        )
    if isinstance(engine_block_tokens, int):
        size = engine_block_tokens
        return tuple(None if number in states else size for number in range(num_tables))
    if len(engine_block_tokens) != num_tables:
        raise LayoutError(
            f"{len(engine_block_tokens)} sizes of engine blocks are given: give one for each of"
            f" {num_tables} block tables, or a single number for all"
        )
    if any((size is None) != (n in states) for n, size in enumerate(engine_block_tokens)):
        raise LayoutError(
            f"engine blocks of {list(engine_block_tokens)} tokens: give None for each of the block"
            f" tables {sorted(states)}, which are of states, and a number for any other"
        )
    return tuple(engine_block_tokens)


def _check_salt(settings: Settings, identity: Identity) -> None:
    if identity.has_pages and settings.salt is not None:
        raise LayoutError(
            "PDSTORE_SALT keeps tenants apart, and this engine's pages are stored whole (so are"
            " states, with speculation), with what an earlier request left in them: they cannot be"
            " used together. Leave PDSTORE_SALT out, and give each tenant a pool of its own"
        )


def _check_boundary(
    boundary_tokens: int,
    freed_tokens: int | None,
    entries: Sequence[int | None],
    layers: Sequence[LayerSpec],
) -> None:
    """Raises LayoutError if engine blocks do not fit a stored block that the engine has set."""
    sizes = sorted({tokens for tokens in entries if tokens is not None})
    freed = {freed_tokens or entries[spec.table] for spec in layers if spec.window}
    if any(tokens is None or tokens % boundary_tokens for tokens in freed):
        raise LayoutError(
            f"engine blocks of {sizes} tokens: those that windows give back must have"
            f" {boundary_tokens} or a multiple of it, or a window could begin inside a block of the"
            " pool"
        )
    if any(boundary_tokens % tokens for tokens in sizes):
        raise LayoutError(
            f"engine blocks of {sizes} tokens do not make up the {boundary_tokens} tokens between"
            " two states that the engine keeps"
        )


def _check_blocks(layout: Layout) -> None:
    """Raises LayoutError if blocks of the pool are not whole engine blocks of every table.

    Neither may a page be more or less than an engine block, nor a packed one be several tensors.
    """
    block_tokens = layout.block_tokens
    is_paged = layout.identity.page is not None
    entries = entries_of(layout.engine_block_tokens, layout.identity.layers)
    for spec in layout.identity.layers:
        if spec.is_page and entries[spec.table] != spec.cell_tokens:
            raise LayoutError(
                f"engine blocks of {entries[spec.table]} tokens, and pages of {spec.cell_tokens}:"
                " a page is stored whole, so it must be one engine block"
            )
    if is_paged and any(spec.scales for spec in layout.identity.layers):
        raise LayoutError(
            "an engine that packs its blocks as pages keeps all of a page in one tensor: its layers"
            " have no scales in tensors of their own"
        )
    for entry_tokens in entries:
        if entry_tokens is None:
            continue
        if block_tokens % entry_tokens or (is_paged and block_tokens != entry_tokens):
            raise LayoutError(
                f"PDSTORE_BLOCK_TOKENS={block_tokens} must be a multiple of the engine's block"
                f" of {entry_tokens} tokens"
            )


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
