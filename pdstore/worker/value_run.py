"""ValueRun: neighbouring values of full blocks, each made only when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

from pdstore.worker.block_range import BlockRange
from pdstore.worker.packed_blocks import PackedBlocks

if TYPE_CHECKING:
    from pdstore.worker.values import Value


class ValueRun(Sequence["Value"]):
    """The values `first` to `stop` of a prompt's full blocks, and the same values packed.

    per_block: values of a block.
    counted: tokens of a block that the first of its values counts for; 0 if another one does.
    make: makes the values of some blocks.
    pack: packs the prompt's full blocks; called when they are wanted.
    """

    def __init__(
        self,
        first: int,
        stop: int,
        per_block: int,
        counted: int,
        make: Callable[[BlockRange], Sequence[Value]],
        pack: Callable[[], PackedBlocks],
    ) -> None:
        self.first, self.stop, self.per_block = first, stop, per_block
        self._counted, self._make, self._pack = counted, make, pack

    @property
    def packed(self) -> PackedBlocks:
        """All values of the prompt's full blocks; these are `first` to `stop` of them."""
        return self._pack()

    @property
    def blocks(self) -> BlockRange:
        """The blocks that these values are of."""
        return BlockRange(self.first // self.per_block, -(-self.stop // self.per_block))

    @property
    def num_counted_tokens(self) -> int:
        """The tokens of the blocks whose counting value is among these."""
        firsts = -(-self.stop // self.per_block) - -(-self.first // self.per_block)
        return firsts * self._counted

    def whole(self, count: int) -> int:
        """Returns how many of the first `count` values make up whole blocks."""
        if count >= len(self):
            return count
        return max(0, count - (self.first + count) % self.per_block)

    def __len__(self) -> int:
        return self.stop - self.first

    def __iter__(self) -> Iterator[Value]:
        before = self.first % self.per_block
        return iter(self._make(self.blocks)[before : before + len(self)])

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Value]: ...

    def __getitem__(self, index: int | slice) -> Value | Sequence[Value]:
        if isinstance(index, int):
            at = range(self.first, self.stop)[index]
            block = at // self.per_block
            return self._make(BlockRange(block, block + 1))[at % self.per_block]
        chosen = range(self.first, self.stop)[index]
        if chosen.step != 1:
            return list(self)[index]
        last = max(chosen.start, chosen.stop)
        run = (chosen.start, last, self.per_block, self._counted, self._make, self._pack)
        return ValueRun(*run)
