"""Continuation: which blocks of a prompt must be there for an engine to go on at a token."""

# Decision: docs/decisions/007-sliding-windows.md
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdstore.errors import LayoutError

NO_BLOCK = -1
"""Entry of a block table for a block that is not there: a sliding window has moved past it."""

BlockTable: TypeAlias = Sequence[int] | Mapping[int, int]
"""The entries of a prompt in one block table.

They are engine blocks in token order. But a table of states is a mapping: a number of tokens leads
to the entry that holds the state after exactly these tokens. So nobody can take an entry that has
the state of another end, and an engine that keeps few states names just these."""

BlockTables: TypeAlias = Sequence[BlockTable]
"""The entries of a prompt in each block table."""


@dataclass(frozen=True)
class Continuation:
    """Tells which blocks must be there for an engine to go on at a token.

    It is asked of KV groups (`Namespace.continuation`) and of block tables (`Layout.continuation`).
    Full attention needs all blocks before that token, a sliding window only the last ones. A state
    counts as a window of one token: its value is stored under the block that ends there.

    block_tokens: the number of tokens in a block of the pool.
    needs: for each KV group or block table that does not need all earlier tokens, by its number:
      how many of the last tokens it needs.
    block_entries: for each block table of tokens, how many entries make up a block of the pool.
    states: the numbers in `needs` that need a state after exactly that token.
    """

    block_tokens: int
    needs: Mapping[int, int] = field(default_factory=dict)
    block_entries: Mapping[int, int] = field(default_factory=dict)
    states: frozenset[int] = frozenset()

    @property
    def needs_all(self) -> bool:
        """True if all blocks must be there: then a prefix of usable blocks is usable itself."""
        return not self.needs

    @property
    def is_exact(self) -> bool:
        """True if an engine can go on only where its KV ends: a state cannot lose a token again."""
        return bool(self.states)

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
            if isinstance(table, Mapping):  # a state is there as a whole, or not at all
                continue
            num_gone = len(table) - table[::-1].index(NO_BLOCK) if NO_BLOCK in table else 0
            if num_gone % self.block_entries[number]:
                raise LayoutError(
                    f"a window begins inside a block of {self.block_tokens} tokens: the pool's"
                    " block must be the engine's, of"
                    f" {self.block_tokens // self.block_entries[number]}"
                )

    def check_states(self, tables: BlockTables, num_tokens: int) -> None:
        """Raises LayoutError if a table lacks the state after these tokens.

        Without it, no engine can go on there, whatever else is there of these tokens.
        """
        for number in sorted(self.states):
            if num_tokens and num_tokens not in tables[number]:
                ends = ", ".join(map(str, sorted(tables[number])))
                others = f"it has those after {ends}" if ends else "it has none"
                raise LayoutError(
                    f"block table {number} has no state after {num_tokens} tokens ({others}): load"
                    " or save a prompt only up to a token after which there is one"
                )

    def _has_gap(self, tables: BlockTables, number: int, num_tokens: int) -> bool:
        """Returns whether a block table lacks an entry that it must have at `num_tokens` tokens."""
        table = tables[number]
        if isinstance(table, Mapping):
            return num_tokens not in table
        blocks = self.blocks(number, num_tokens)
        step = self.block_entries[number]
        return NO_BLOCK in table[blocks.start * step : blocks.stop * step]


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


def states_of(layers: Iterable[tuple[int, bool]]) -> frozenset[int]:
    """Returns `Continuation.states`. layers: for each the number, and whether it keeps a state."""
    return frozenset(of for of, is_state in layers if is_state)
