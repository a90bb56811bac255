"""Geometry: what of an engine's paged cache each part of a block is, in cells and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PartGeometry:
    """The cells of one part, in the paged cache of a rank that owns the part.

    A cell is what is stored only as a whole: the bytes of some tokens, of one head in one layer.
    Mostly it has one token; a packed page is a single cell. A payload has the cells in the order
    `[layer][cell][head]`. Where an engine's page has several layers and heads, each piece of the
    page is a cell, and counts as a layer with one head.

    layers: the numbers of the part's layers, or of its pieces, in order.
    table: the number of the block table that names the engine blocks of these layers.
    first_head, num_heads: the part's heads, counted among those that the rank has.
    cell_bytes: the bytes of a cell.
    cell_tokens: the number of tokens of a cell.
    entry_tokens: the number of tokens of one entry of the block table, a multiple of `cell_tokens`.
    """

    layers: tuple[int, ...]
    table: int
    first_head: int
    num_heads: int
    cell_bytes: int
    cell_tokens: int
    entry_tokens: int

    @classmethod
    def of_tokens(
        cls, layers: Sequence[int], table: int, heads: range, token_bytes: int, entry_tokens: int
    ) -> PartGeometry:
        """Returns the cells of a part whose blocks may be cut after any token.

        token_bytes: the bytes of one token, of one head in one layer.
        """
        return cls((*layers,), table, heads.start, len(heads), token_bytes, 1, entry_tokens)

    def in_pages(self) -> PartGeometry:
        """Returns the same part with one cell for each engine block, of one head in one layer."""
        page_bytes = self.entry_cells * self.cell_bytes
        return replace(self, cell_bytes=page_bytes, cell_tokens=self.entry_tokens)

    def in_pieces(self, count: int) -> PartGeometry:
        """Returns the same part with `count` equal cells for each engine block, of all layers."""
        return replace(
            self,
            layers=tuple(range(count)),
            first_head=0,
            num_heads=1,
            cell_bytes=self.payload_bytes(self.entry_tokens) // count,
            cell_tokens=self.entry_tokens,
        )

    @property
    def entry_cells(self) -> int:
        """The number of cells in one engine block, of one head in one layer."""
        return self.entry_tokens // self.cell_tokens

    @property
    def heads(self) -> slice:
        """The part's heads among those that the rank has."""
        return slice(self.first_head, self.first_head + self.num_heads)

    def num_cells(self, num_tokens: int) -> int:
        """Returns how many cells `num_tokens` tokens need, of one head in one layer."""
        return -(-num_tokens // self.cell_tokens)

    def num_bytes(self, num_cells: int) -> int:
        """Returns the length in bytes of a payload with so many cells of each head and layer."""
        return len(self.layers) * num_cells * self.num_heads * self.cell_bytes

    def payload_bytes(self, num_tokens: int) -> int:
        """Returns the length in bytes of the payload of a block of `num_tokens` tokens."""
        return self.num_bytes(self.num_cells(num_tokens))
