"""Continuation: which blocks of a prompt must be there for an engine to go on at a token."""

# Decision: docs/decisions/007-sliding-windows.md
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdstore.errors import LayoutError

NO_BLOCK = -1
"""Entry of a block table for a block that is not there: a sliding window has moved past it."""

BlockTables: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Continuation:
    """Tells which blocks must be there for an engine to go on at a token.

    It is asked of KV groups (`Namespace.continuation`) and of block tables (`Layout.continuation`).
    Full attention needs all blocks before that token, a sliding window only the last ones.

    block_tokens: the number of tokens in a block of the pool.
    needs: for each KV group or block table that does not need all earlier tokens, by its number:
      how many of the last tokens it needs.
    block_entries: for each block table, how many of its entries make up a block of the pool.
    """

    block_tokens: int
    needs: Mapping[int, int] = field(default_factory=dict)
    block_entries: Mapping[int, int] = field(default_factory=dict)

    @property
    def needs_all(self) -> bool:
        """True if all blocks must be there: then a prefix of usable blocks is usable itself."""
        return not self.needs

    def blocks(self, of: int, num_tokens: int) -> range:
        """Returns the blocks that must be there to go on after `num_tokens` tokens, by number.

        of: the number of a KV group or of a block table.
        """
        first_token = max(0, num_tokens - self.needs.get(of, num_tokens))
        return range(first_token // self.block_tokens, -(-num_tokens // self.block_tokens))

    def most_present(self, num_tokens: int) -> int:
        """Returns how many of a prompt's tokens an engine may at most be told to have.

        An engine computes the last token again, even if it has all tokens. Told so, it would give
        back the block that only the last token's window still needs.
        """
        return num_tokens if self.needs_all else num_tokens - 1

    def usable_end(self, tables: BlockTables, end: int, start: int) -> int:
        """Returns the largest number of tokens, up to `end`, after which an engine can go on.

        An engine can go on at a block's end, if the tables have all blocks that it needs there. If
        there is no such end after `start`, the result is `start`, where the engine is already.
        """
        for stop in range(end // self.block_tokens, start // self.block_tokens, -1):
            num_tokens = stop * self.block_tokens
            if not any(self._has_gap(tables, number, num_tokens) for number in self.needs):
                return num_tokens
        return start

    def check_gaps(self, tables: BlockTables) -> None:
        """Raises LayoutError if only a part of some block is there, because a window begins in it.

        Such a block cannot be loaded: a stored value is a whole block.
        """
        for number, table in enumerate(tables):
            num_gone = len(table) - table[::-1].index(NO_BLOCK) if NO_BLOCK in table else 0
            if num_gone % self.block_entries[number]:
                raise LayoutError(
                    f"a window begins inside a block of {self.block_tokens} tokens: the pool's"
                    " block must be the engine's, of"
                    f" {self.block_tokens // self.block_entries[number]}"
                )

    def _has_gap(self, tables: BlockTables, number: int, num_tokens: int) -> bool:
        """Returns whether a block table lacks an entry that it must have at `num_tokens` tokens."""
        blocks = self.blocks(number, num_tokens)
        step = self.block_entries[number]
        return NO_BLOCK in tables[number][blocks.start * step : blocks.stop * step]


def needs_of(layers: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """Returns `Continuation.needs`: what the layers of a KV group or block table need together.

    layers: for each layer the number of its KV group or block table, and how many of the last
      tokens the layer needs; None for all.
    """
    needs: dict[int, int | None] = {}
    for of, need in layers:
        other = needs.get(of, 0)
        needs[of] = None if need is None or other is None else max(need, other)
    return {of: need for of, need in needs.items() if need is not None}
