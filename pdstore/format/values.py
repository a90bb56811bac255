"""Values: a prompt's values in key order, as columns: keys, headers, sizes and engine blocks.

Decision: values are kept as a column for each field. The columns are made a single time for a
prompt and cut into shares. A large load moves thousands of values: code that ran in each share for
each value would keep the GIL from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from pdstore.format.keys import BlockKey, Part


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


@dataclass(frozen=True)
class Values:
    """Values of a prompt in key order; the i-th entry of each column belongs to the i-th value.

    keys: the value's key in the store.
    header_prefixes: the first bytes of the value, as `block.start_of` makes them from its header.
    sizes: the value's bytes, header included.
    numbers: the index of the value's block in the prompt.
    parts: the layers and heads that the value holds.
    block_ids: the engine blocks that hold the tokens of the value's block.
    num_cells: the block's number of cells, of one head in one layer (`PartGeometry`).
    num_counted: the block's number of tokens if the value is the block's first one on this rank,
      else 0: so a sum over all values counts each block once.
    """

    keys: Sequence[BlockKey]
    header_prefixes: Sequence[bytes]
    sizes: Sequence[int]
    numbers: Sequence[int]
    parts: Sequence[Part]
    block_ids: Sequence[Sequence[int]]
    num_cells: Sequence[int]
    num_counted: Sequence[int]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> Values:
        return Values(*[column[part] for column in vars(self).values()])

    @classmethod
    def joined(cls, pieces: Sequence[Values]) -> Values:
        """Returns the values of all pieces, one piece after the other."""
        columns = zip(*[vars(piece).values() for piece in pieces], strict=True)
        return cls(*[list(chain.from_iterable(column)) for column in columns])

    def chosen(self, indices: Sequence[int]) -> Values:
        """Returns the values at these indices."""
        return Values(*[[column[i] for i in indices] for column in vars(self).values()])

    def num_whole(self, count: int) -> int:
        """Returns how many of the first `count` values make up whole blocks."""
        while 0 < count < len(self) and self.numbers[count] == self.numbers[count - 1]:
            count -= 1
        return count

    def blocks(self) -> Iterator[Values]:
        """Yields the values of one block after the other."""
        firsts = {number: i for i, number in reversed([*enumerate(self.numbers)])}
        for first, stop in pairwise(sorted({*firsts.values(), len(self)})):
            yield self[first:stop]
