"""Geometry: what lies where in the paged cache of one rank, in cells and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from pdstore.errors import LayoutError
from pdstore.format.keys import Part


@dataclass(frozen=True)
class CacheGeometry:
    """The cells of one cache: of a layer, or of one piece of every page of a rank.

    A cell is what is stored only as a whole: the bytes of some tokens, of one head. Mostly it has
    one token; a packed page is a single cell, and so is a state, which stands for all tokens before
    its end.

    table: the number of the block table that names the engine blocks of this cache.
    entry_tokens: the number of tokens of an engine block, which is one entry of that table; a
      multiple of `cell_tokens`. None for states.
    cell_tokens: the number of tokens of a cell; None for states.
    cell_bytes: the bytes of a cell.
    num_heads: the number of KV heads that the rank has.
    dtype: the name of the element type in torch, for a tensor [blocks, tokens, heads, channels].
      None for a tensor of any type that has one cell in each block, whose bytes are contiguous.
    scales: the dtypes of the tensors of scales, each [blocks, tokens, heads], that belong to the
      cache. A cell ends with their numbers, in this order.
    """

    table: int
    entry_tokens: int | None
    cell_tokens: int | None
    cell_bytes: int
    num_heads: int
    dtype: str | None
    scales: tuple[str, ...] = ()

    @classmethod
    def of_blocks(cls, table: int, tokens: int | None, num_bytes: int) -> CacheGeometry:
        """Returns the cells of a layer whose blocks, of `num_bytes` bytes, are one cell each.

        tokens: the number of tokens of a page; None for states.
        """
        return cls(table, tokens, tokens, num_bytes, num_heads=1, dtype=None)

    @property
    def entry_cells(self) -> int:
        """The number of cells in one engine block, of one head."""
        if self.entry_tokens is None or self.cell_tokens is None:
            return 1
        return self.entry_tokens // self.cell_tokens

    def num_cells(self, num_tokens: int) -> int:
        """Returns how many cells `num_tokens` tokens need, of one head."""
        if self.cell_tokens is None:
            return min(num_tokens, 1)
        return -(-num_tokens // self.cell_tokens)

    def cells_before(self, num_tokens: int) -> int:
        """Returns how many cells end within the first `num_tokens` tokens of a block.

        A state is never one of them: it is needed whole, wherever the tokens begin.
        """
        return 0 if self.cell_tokens is None else num_tokens // self.cell_tokens

    def in_pages(self) -> CacheGeometry:
        """Returns the same cache with one cell for each engine block, of one head."""
        page_bytes = self.entry_cells * self.cell_bytes
        return replace(self, cell_bytes=page_bytes, cell_tokens=self.entry_tokens)


@dataclass(frozen=True)
class PartGeometry:
    """The cells of one part, in the paged cache of a rank that owns the part.

    A payload has the cells in the order `[layer][cell][head]`. Where an engine's page has several
    layers and heads, each piece of the page is a cell, and counts as a layer with one head.

    layers: the numbers of the part's caches (`Geometry.caches`), in order.
    cache: the geometry of each of these caches; they are all equal.
    first_head, num_heads: the part's heads, counted among those that the rank has.
    """

    layers: tuple[int, ...]
    cache: CacheGeometry
    first_head: int
    num_heads: int

    @property
    def heads(self) -> slice:
        """The part's heads among those that the rank has."""
        return slice(self.first_head, self.first_head + self.num_heads)

    def num_bytes(self, num_cells: int) -> int:
        """Returns the length in bytes of a payload with so many cells of each head and layer."""
        return len(self.layers) * num_cells * self.num_heads * self.cache.cell_bytes

    def payload_bytes(self, num_tokens: int) -> int:
        """Returns the length in bytes of the payload of a block of `num_tokens` tokens."""
        return self.num_bytes(self.cache.num_cells(num_tokens))


@dataclass(frozen=True)
class Geometry:
    """Places of KV on one rank: in its paged cache, and in the payloads of a pool's block.

    block_tokens: the number of tokens in a block of the pool, a multiple of each table's entry.
    tables: for each block table, the number of tokens of its entries: they are engine blocks. None
      for a table of states.
    caches: the rank's caches by number, in the order of the tensors that the engine gives: the
      caches of layers, or of the pieces of every page.
    parts: the parts that the rank saves and loads, in the order of their keys.
    """

    block_tokens: int
    tables: tuple[int | None, ...]
    caches: Mapping[int, CacheGeometry]
    parts: Mapping[Part, PartGeometry]

    @cached_property
    def largest_payload_bytes(self) -> int:
        return max(part.payload_bytes(self.block_tokens) for part in self.parts.values())

    @property
    def common_tokens(self) -> int:
        """The number of tokens after which an entry ends in every table of tokens, repeatedly."""
        return lcm(*(tokens for tokens in self.tables if tokens is not None))

    def block_entries(self, table: int) -> int:
        """Returns how many entries of a block table make up a block of the pool."""
        return self.block_tokens // self._entry_tokens(table)

    def num_entries(self, table: int, num_tokens: int) -> int:
        """Returns how many entries of a block table hold `num_tokens` tokens."""
        return -(-num_tokens // self._entry_tokens(table))

    def _entry_tokens(self, table: int) -> int:
        tokens = self.tables[table]
        if tokens is None:
            raise LayoutError(f"block table {table} is of states: its entries have no tokens")
        return tokens
