"""PackedBlocks: a prompt's values in the library's form, packed once for the whole prompt.

A large load moves thousands of values. Each is a record of equal size in every field, and a share
takes its slice of them: no Python runs for a block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.namespace import Part


class ValueShape(NamedTuple):
    """The fields that all values of one part share, in blocks of one length.

    table: the engine blocks of the prompt that hold the part.
    start: the first bytes of a value without the prefix hash at their end.
    size: bytes of a value.
    """

    part: Part
    table: Sequence[int]
    start: bytes
    size: int


class PackedBlocks:
    """All full blocks of a prompt, as the library takes them: each value is a record of each field.

    shapes: of the values of a block, in order.
    step: engine blocks of a block. cells: tokens of a block as block copies see them.
    """

    def __init__(
        self, keys: PromptKeys, shapes: Sequence[ValueShape], step: int, cells: int
    ) -> None:
        self.shapes, self.step, self.cells = shapes, step, cells
        count = keys.num_tokens // keys.block_tokens
        names = keys.store_keys([shape.part for shape in shapes], 0, count)
        hashes = keys.hashes(count)
        self._names = "".join([name + "\0" for name in names]).encode()
        lengths = [len(name) + 1 for name in names[: len(shapes)]]
        self._name_ends = [0, *accumulate(lengths)]
        self._starts = b"".join([s.start + one for one in hashes for s in shapes])
        self._sizes = struct.pack(f"={len(shapes)}q", *(s.size for s in shapes)) * count
        tables = [array("q", s.table[: count * step]).tobytes() for s in shapes]
        self._ids = tables[0] if len(tables) == 1 else _interleaved(tables, 8 * step)

    def names(self, first: int, stop: int) -> bytes:
        """The keys of some values, a zero after each."""
        return self._names[self._name_at(first) : self._name_at(stop)]

    def keys(self, first: int, stop: int) -> list[BlockKey]:
        """The keys of some values."""
        return [BlockKey(name) for name in self.names(first, stop).decode().split("\0")[:-1]]

    def starts(self, first: int, stop: int) -> bytes:
        """The first bytes of some values, side by side."""
        size = len(self.shapes[0].start) + 16
        return self._starts[first * size : stop * size]

    def sizes(self, first: int, stop: int) -> bytes:
        """The sizes of some values, int64 each."""
        return self._sizes[8 * first : 8 * stop]

    def ids(self, first: int, stop: int) -> bytes:
        """The engine blocks of some values, int64 each."""
        size = 8 * self.step
        return self._ids[first * size : stop * size]

    def _name_at(self, number: int) -> int:
        block, part = divmod(number, len(self.shapes))
        return block * self._name_ends[-1] + self._name_ends[part]


def _interleaved(tables: Sequence[bytes], size: int) -> bytes:
    """Returns pieces of so many bytes of each table in turn."""
    ends = range(0, len(tables[0]), size)
    return b"".join([table[at : at + size] for at in ends for table in tables])
