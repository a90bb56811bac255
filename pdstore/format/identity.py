"""Identity: what two instances must have in common to share blocks; a namespace is its digest.

It also says in which parts a block is stored, because each part is a value with a key of its own.
Where the bytes of a part lie in an engine's memory is `pdstore.format.geometry`.
"""

# Decision: docs/decisions/005-namespace-fields.md
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import torch

from pdstore.errors import LayoutError
from pdstore.format.continuation import needs_of, states_of
from pdstore.format.keys import (
    DRAFT_DIGITS,
    FORMAT_VERSION,
    Json,
    Namespace,
    Part,
    canonical,
)
from pdstore.settings import Settings


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the whole model (not of one rank) that keeps something of a prompt.

    num_kv_heads: KV heads; 1 if each rank holds all of the layer. Of a state, the ranks that each
      have a part of it.
    head_dim: elements of K per head and token; for MLA, elements of the latent and its rope part.
      Of a state, its bytes on one rank; of a page, its bytes.
    value_dim: elements of V per head and token; None: as many as K has; 0: V is not stored (MLA).
    window: the length of a sliding window in tokens; None for full attention.
    table: the number of the engine's block table that names this layer's blocks.
    is_whole: True if each rank holds all of the layer, as with MLA.
    form: None for a layer with KV of each token. Of a state, which stands for a whole prefix, and
      of a page, this text says what its bytes are: their types, shapes and order. States or pages
      of two forms are never exchanged.
    cell_tokens: the number of tokens that are stored only together: of a page, all of its tokens;
      None for a state.
    scales: the name in torch of the type of the scales that a quantized cache keeps in tensors of
      their own: of each token and head one for K and, unless V is not stored, one for V. None if
      there are no such tensors.
    optional: True for a layer of a draft model (EAGLE, MTP), whose KV makes no answer different.
      It is loaded where it is stored, and nothing depends on it.

    `latent`, `state` and `page` make the layers that are neither full attention nor a sliding
    window. Raises LayoutError for scales that no torch dtype names, and for those of a state or a
    page, whose bytes contain all that they need.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    table: int = 0
    is_whole: bool = False
    form: str | None = None
    cell_tokens: int | None = 1
    scales: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.optional and self.is_state:
            raise LayoutError("a draft's layer with a state is not supported: only KV of tokens is")
        if self.scales is None:
            return
        if not isinstance(getattr(torch, self.scales, None), torch.dtype):
            raise LayoutError(f"scales of {self.scales!r}: this is no torch dtype")
        if self.form is not None:
            raise LayoutError(
                "a state or a page is one tensor, with its scales inside: leave `scales` out, and"
                " let `form` tell where they are"
            )

    @classmethod
    def latent(cls, channels: int, *, table: int = 0) -> LayerSpec:
        """Returns a layer of MLA: a latent of so many elements, which each rank holds whole."""
        return cls(1, channels, value_dim=0, table=table, is_whole=True)

    @classmethod
    def state(
        cls, num_bytes: int, form: str, *, ranks: int = 1, table: int = 0, is_whole: bool = False
    ) -> LayerSpec:
        """Returns a layer that keeps a state, as Mamba2 or a short convolution does.

        num_bytes: of the state on each rank.
        ranks: how many ranks have a part of the state: the TP size.
        is_whole: True if each rank has the same state; `ranks` has no meaning then.
        """
        parts = 1 if is_whole else ranks
        return cls(
            parts,
            num_bytes,
            value_dim=0,
            table=table,
            is_whole=is_whole,
            form=form,
            cell_tokens=None,
        )

    @classmethod
    def page(cls, num_bytes: int, tokens: int, form: str, *, table: int = 0) -> LayerSpec:
        """Returns a layer whose engine blocks are pages that each rank holds whole.

        An example is the indexer of sparse attention, whose pages have the rows of all tokens and
        then their scales.

        tokens: the number of tokens of a page, which are those of an engine block in its table.
        Raises LayoutError for less than one token.
        """
        if tokens < 1:
            raise LayoutError(f"a page of {tokens} tokens: give the tokens of an engine block")
        return cls(
            1,
            num_bytes,
            value_dim=0,
            table=table,
            is_whole=True,
            form=form,
            cell_tokens=tokens,
        )

    @property
    def channels(self) -> int:
        """Elements of K and V together, per head and token."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)

    def cell_bytes(self, itemsize: int) -> int:
        """Returns the bytes of a cell, of one head. itemsize: the bytes of an element of KV."""
        num_bytes = self.channels * (itemsize if self.form is None else 1)
        for name in self.scales_of_cell:
            dtype: torch.dtype = getattr(torch, name)
            num_bytes += dtype.itemsize
        return num_bytes

    @property
    def scales_of_cell(self) -> tuple[str, ...]:
        """The dtype of each scale behind the elements of a cell: K's, and then V's."""
        return (self.scales,) * (1 if self.value_dim == 0 else 2) if self.scales else ()

    @property
    def is_state(self) -> bool:
        """True if the layer keeps one state for a whole prefix."""
        return self.cell_tokens is None

    @property
    def is_page(self) -> bool:
        """True if the layer's engine blocks are pages, whose bytes `form` gives their meaning."""
        return self.form is not None and self.cell_tokens is not None

    @property
    def needs(self) -> int | None:
        """The number of last tokens that an engine needs of it to go on; None for all."""
        return 1 if self.is_state else self.window


@dataclass(frozen=True)
class Identity:
    """Meaning of the bytes of a stored block, whichever instance stores it.

    dtype: the name of the cache's element type in torch.
    layers: one LayerSpec per layer of the whole model, in order; equal specs of one layer range
      form one KV group. Optional layers come last, and are one range behind the others.
    block_tokens: tokens of a stored block.
    rope: the text that `shaping` makes of the model's configuration.
    page: None for token-major payloads, `[layer][token][head][K|V]`. For an engine that packs
      tokens in its own way, a text that names this way. Payloads are then `[layer][head][page]`:
      one head of an engine block as it lies in memory, for a tail too.
    num_shards: the number of shards that the KV heads of a group are split into; an MLA group
      always has one shard, and so have states that each rank holds whole.
    num_ranges: the number of layer ranges that the other layers are split into, as evenly as
      possible. P can store one range while the model computes the next range.
    items: how keys name images, sounds and videos; None for a model of text.
    speculation: the number of tokens that the engine drafts, if the model has states, else 0. For
      each of them a convolution's state has one more row, which nothing reads before a draft has
      filled it: until then it has what an earlier request left there.
    draft: a text that names what computes the optional layers: the draft model's revision, and
      what changes its KV although its weights stay the same.

    Raises LayoutError for numbers that do not fit together.
    """

    dtype: str
    layers: tuple[LayerSpec, ...]
    block_tokens: int
    rope: str
    quantization: str | None = None
    page: str | None = None
    num_shards: int = 1
    num_ranges: int = 1
    items: str | None = None
    speculation: int = 0
    draft: str = ""

    def __post_init__(self) -> None:
        if not self.layers or self.layers[0].optional:
            raise LayoutError("a layout needs at least one layer that is not optional")
        if any(spec.optional for spec in self.needed_layers):
            raise LayoutError("optional layers, which are a draft model's, come after all others")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise LayoutError(f"{self.dtype!r} is no torch dtype")
        num_layers = len(self.needed_layers)
        if not 1 <= self.num_ranges <= num_layers:
            raise LayoutError(f"{num_layers} layers do not make {self.num_ranges} ranges")
        for spec in self.layers:
            if spec.is_state and not spec.is_whole and spec.num_kv_heads != self.num_shards:
                raise LayoutError(
                    f"states of {spec.num_kv_heads} ranks do not split into {self.num_shards}"
                    " shards, since a part of a state cannot be cut: give P and D the same TP size,"
                    " and do not set PDSTORE_KV_SHARDS"
                )
            if not spec.is_whole and spec.num_kv_heads % self.num_shards:
                raise LayoutError(
                    f"{spec.num_kv_heads} KV heads do not split into {self.num_shards} shards:"
                    " PDSTORE_KV_SHARDS and the TP size must divide them (where several ranks"
                    " hold copies of a head, P and D need the same TP size)"
                )

    @cached_property
    def itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def needed_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that are not optional: those of the model without its draft."""
        return self.layers[: _num_needed(self.layers)]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a whole block: the KV of its tokens, of all heads; no states, no drafts."""
        num_bytes = 0
        for spec in self.needed_layers:
            if spec.cell_tokens is not None:
                num_cells = self.block_tokens // spec.cell_tokens * spec.num_kv_heads
                num_bytes += num_cells * spec.cell_bytes(self.itemsize)
        return num_bytes

    @property
    def has_pages(self) -> bool:
        """True if values may bring with them what an earlier request left in the same memory.

        A tail does so if its tokens lie in pages, and a state if it has rows for drafts.
        """
        is_paged = self.page is not None or any(spec.is_page for spec in self.layers)
        return is_paged or self.speculation > 0

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layer numbers of each KV group of the whole model; see `groups_of` for the order."""
        return groups_of(self.layers, self.num_ranges)

    @cached_property
    def drafts(self) -> frozenset[int]:
        """The numbers of the KV groups whose layers are optional."""
        return frozenset(n for n in range(len(self.groups)) if self.spec_of(n).optional)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts that make up one block, of all ranks, in the order of their keys; no drafts."""
        return tuple(part for part in self.all_parts if part.group not in self.drafts)

    @cached_property
    def all_parts(self) -> tuple[Part, ...]:
        """All parts of one block, of all ranks, and then those of its drafts."""
        return tuple(Part(g, s) for g in range(len(self.groups)) for s in range(self.shards_of(g)))

    @cached_property
    def grid_shards(self) -> int:
        """The number of shards of a block; 1 if all KV groups are MLA, whatever the TP size."""
        return max(self.shards_of(part.group) for part in self.parts)

    def shards_of(self, group: int) -> int:
        return 1 if self.spec_of(group).is_whole else self.num_shards

    def spec_of(self, group: int) -> LayerSpec:
        """Returns what all layers of a KV group are."""
        return self.layers[self.groups[group][0]]

    def range_of(self, layer: int) -> int:
        """Returns the layer range that a layer belongs to, counted from 0.

        Optional layers are in range number `num_ranges`.
        """
        if self.layers[layer].optional:
            return self.num_ranges
        return range_of(layer, len(self.needed_layers), self.num_ranges)

    def namespace(self, settings: Settings, *, weights: str) -> Namespace:
        """Returns the namespace of an instance with this identity; it has a digest of the salt.

        It is the namespace of the same model without a draft: the fields name no optional layer.
        weights: the weights' revision (`pdstore.weights_revision`), without a draft's.
        """
        layers = self.needed_layers
        salt = settings.salt.get_secret_value() if settings.salt else ""
        bare = salt.strip()
        fields: dict[str, Json] = {
            "format": FORMAT_VERSION,
            "weights": weights,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "layers": [_row_of(spec) for spec in layers],
            "windows": [spec.window for spec in layers],
            "rope": self.rope,
            "block_tokens": self.block_tokens,
            "order": "token" if self.page is None else "page",
            "page": self.page,
            "tables": self._tables(),
            "shards": self.grid_shards,
            "draft_layers": 0,
            "layer_ranges": self.num_ranges,
            "hash": "sha256",
            "salt": sha256(salt.encode()).hexdigest() if salt else None,
        }
        if settings.seal_key_file is not None:
            fields["seal"] = "aes-256-gcm"
        needed = [n for n in range(len(self.groups)) if n not in self.drafts]
        return Namespace(
            {**fields, **self._rare_fields()},
            self.parts,
            self.block_tokens,
            num_shards=self.grid_shards,
            needs=needs_of((n, self.spec_of(n).needs) for n in needed),
            states=states_of((n, self.spec_of(n).is_state) for n in needed),
            bare_salt=sha256(bare.encode()).hexdigest() if bare != salt else None,
            has_pages=self.has_pages,
            drafts={n: self._draft_name(n) for n in sorted(self.drafts)},
        )

    def _tables(self) -> list[Json]:
        """Returns the block table of each needed layer, counted without those of drafts alone."""
        needed = [spec.table for spec in self.needed_layers]
        of_drafts = {spec.table for spec in self.layers} - {*needed}
        return [table - sum(of < table for of in of_drafts) for table in needed]

    def _rare_fields(self) -> dict[str, Json]:
        """Returns fields that are there only if needed, so that older namespaces stay valid."""
        layers = self.needed_layers
        fields: dict[str, Json] = {} if self.items is None else {"items": self.items}
        if any(spec.form is not None for spec in layers):
            fields["form"] = [spec.form for spec in layers]
        if any(spec.scales is not None for spec in layers):
            fields["scales"] = [spec.scales for spec in layers]
        if self.speculation:
            fields["speculation"] = self.speculation
        return fields

    def _draft_name(self, group: int) -> str:
        """Returns a digest of all that the bytes of a draft's KV group depend on.

        The namespace, which keys have as well, names the model behind the draft.
        """
        num_needed = len(self.needed_layers)
        specs = [(number - num_needed, self.layers[number]) for number in self.groups[group]]
        rows = [[n, *_row_of(of), of.window, of.form, of.scales] for n, of in specs]
        what = [self.draft, self.dtype, self.page, self.shards_of(group), rows]
        return sha256(canonical(what).encode()).hexdigest()[:DRAFT_DIGITS]


def _num_needed(layers: Sequence[LayerSpec]) -> int:
    """Returns the number of the last layer that is not optional, plus 1."""
    return max((n for n, spec in enumerate(layers, 1) if not spec.optional), default=0)


def _row_of(spec: LayerSpec) -> list[Json]:
    """Returns what a namespace's field `layers` says of a layer; of a page, its tokens are last."""
    last = spec.cell_tokens if spec.is_page else spec.channels
    return [_kind_of(spec), spec.num_kv_heads, spec.head_dim, last]


def _kind_of(spec: LayerSpec) -> str:
    """Returns the first word about a layer in a namespace's field `layers`."""
    if spec.form is not None:
        return "state" if spec.is_state else "page"
    if spec.is_whole:
        return "mla"
    return "full" if spec.window is None else "sliding"


def range_of(layer: int, num_layers: int, num_ranges: int) -> int:
    """Returns the range of a layer if the layers are split into ranges as evenly as possible."""
    return layer * num_ranges // num_layers


def groups_of(layers: Sequence[LayerSpec], num_ranges: int) -> tuple[tuple[int, ...], ...]:
    """Returns the layer numbers of each KV group; the groups are sorted by their first layer.

    All layers of a group have equal specs and lie in one layer range. The groups of a range come
    before the groups of the next range, and those of optional layers come last.
    """
    groups: dict[tuple[int, LayerSpec], list[int]] = {}
    num_needed = _num_needed(layers)
    for number, spec in enumerate(layers):
        at = num_ranges if spec.optional else range_of(number, num_needed, num_ranges)
        groups.setdefault((at, spec), []).append(number)
    return tuple(tuple(numbers) for numbers in groups.values())
