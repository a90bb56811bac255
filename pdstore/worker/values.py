"""The blocks of a prompt that a job moves, their split into ranges, and the values of the blocks.

Decision: values are kept as a column for each field. The columns are made a single time for a
prompt and cut into shares. A large load moves thousands of values: code that ran in each share for
each value would keep Python's lock from the engine's thread.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from pdstore.format import block
from pdstore.format.keys import BlockKey, Part, PromptKeys
from pdstore.format.layout import NO_BLOCK, BlockTables, Layout

Tables = tuple[Sequence[int], ...]

RANGE_BYTES = 32 << 20
"""The approximate bytes of a block range. With smaller ranges, workers wait for Python's lock;
larger ranges do not fit the cores' caches."""


class BlockRange(NamedTuple):
    """Blocks of a prompt, by number: from `first` up to, not including, `stop`."""

    first: int
    stop: int


class Split(NamedTuple):
    """The way in which a job's blocks are split into ranges, and how early a save begins.

    range_bytes: the approximate bytes of one range.
    many: a job of fewer ranges is split into this many smaller ranges, none of them smaller than
      `range_bytes / many`, so that several workers share it. 1 makes no such split: the library
      spreads the work on one range over the processors.
    at_once: how many ranges a worker moves in one share, because a call of the library takes them.
    num_workers: the default of PDSTORE_WORKERS: up to 16, because the calls of most stores wait.
    most_woken: how many workers a job wakes that no other instance waits for. Each of them takes
      Python's lock from the engine; the library needs only one to keep the device busy.
    early_ranges: a layer range of this many block ranges or more is saved before later layers are
      computed. Smaller layer ranges are saved together, because each save takes time in Python.
    """

    range_bytes: int = RANGE_BYTES
    many: int = 8
    at_once: int = 1
    num_workers: int = max(4, min(16, len(os.sched_getaffinity(0))))
    most_woken: int = 1 << 16
    early_ranges: int = 4

    @classmethod
    def of_arena(cls, range_bytes: int) -> Split:
        """Returns the split for copies in an arena's memory, which run little Python code."""
        return cls(range_bytes, 1, at_once=8, num_workers=4, most_woken=1, early_ranges=2)

    @classmethod
    def of_files(cls, range_bytes: int) -> Split:
        """Returns the split for files that the library's threads share: large ranges."""
        return cls(4 * range_bytes, 4, num_workers=4, most_woken=2, early_ranges=1)

    @property
    def early_bytes(self) -> int:
        """Minimum bytes of a layer range that is saved while later layers are computed."""
        return self.early_ranges * self.range_bytes

    def ranges(self, first: int, stop: int, num_bytes: int) -> list[BlockRange]:
        """Splits the blocks first..stop, which have `num_bytes` bytes, into even ranges."""
        least_bytes = max(1, self.range_bytes // self.many)
        wanted = max(num_bytes // self.range_bytes, min(self.many, num_bytes // least_bytes))
        count = max(1, min(wanted, stop - first))
        ends = [first + (stop - first) * i // count for i in range(count + 1)]
        return [BlockRange(*ends) for ends in pairwise(ends)]


@dataclass(frozen=True)
class Values:
    """Values of a prompt in key order; the i-th entry of each column belongs to the i-th value.

    keys: the value's key in the store.
    starts: the first bytes of the value, as `block.start_of` makes them from its header.
    sizes: the value's bytes, header included.
    numbers: the index of the value's block in the prompt.
    parts: the layers and heads that the value holds.
    block_ids: the engine blocks that hold the tokens of the value's block.
    num_cells: the block's number of tokens for block copies, where a packed page counts as one.
    num_counted: the block's number of tokens if the value is the block's first one on this rank,
      else 0: so a sum over all values counts each block once.
    """

    keys: Sequence[BlockKey]
    starts: Sequence[bytes]
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


@dataclass(eq=False)
class PromptBlocks:
    """The blocks of one prompt that this rank moves, and where they are in the paged cache.

    keys, tables: nobody may change them after they are given here.
    first: the number of the first block that is asked for.
    """

    layout: Layout
    keys: PromptKeys
    tables: BlockTables
    first: int = 0
    _made: dict[int | None, Values] = field(default_factory=dict, init=False)  # by layer range
    _making: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def _per_block(self) -> int:
        """The number of engine blocks that make a block of the pool."""
        return self.layout.block_tokens // self.layout.engine_block_tokens

    def values(self, blocks: BlockRange, layer_range: int | None = None) -> Values:
        """Returns the values of some blocks, of one layer range or (None) of all layers.

        A value is left out if a sliding window has given back one of its engine blocks.
        """
        with self._making:  # all workers of a job use the same columns
            values = self._of_layers(layer_range)
        first, stop = (bisect_left(values.numbers, number) for number in blocks)
        return values[first:stop]

    def usable_end(self, end: int, first_token: int) -> int:
        """Returns the largest number of tokens, up to `end`, after which an engine can go on.

        An engine can go on from the end of the prompt, from `first_token` tokens, and from the end
        of each block where the sliding windows still have all engine blocks that they need.
        """
        if end == self.keys.num_tokens:
            return end
        size, step = self.layout.block_tokens, self._per_block
        windows = {(spec.table, spec.window) for spec in self.layout.layers if spec.window}
        for stop in range(end // size, first_token // size, -1):
            starts = [(table, max(0, stop * size - window) // size) for table, window in windows]
            if not any(NO_BLOCK in self.tables[n][at * step : stop * step] for n, at in starts):
                return stop * size
        return first_token

    def values_from(self, first_block: int, layer_range: int | None = None) -> Values:
        """Returns the values of the blocks from `first_block` on."""
        return self.values(BlockRange(first_block, len(self.keys)), layer_range)

    def _of_layers(self, layer_range: int | None) -> Values:
        values = self._made.get(layer_range)
        if values is None:
            values = self._all() if layer_range is None else self._of_layers(None)
            if layer_range is not None:
                parts = self.layout.parts_of.get(layer_range, ())
                values = values.chosen([i for i, part in enumerate(values.parts) if part in parts])
            self._made[layer_range] = values
        return values

    def _all(self) -> Values:
        size, keys = self.layout.block_tokens, self.keys
        num_full = keys.num_tokens // size
        values = self._of_length(size, BlockRange(min(self.first, num_full), num_full))
        if len(keys) > num_full:
            tail = self._of_length(keys.tokens_of(num_full), BlockRange(num_full, num_full + 1))
            columns = zip(vars(values).values(), vars(tail).values(), strict=True)
            values = Values(*[[*full, *last] for full, last in columns])
        if self.layout.has_windows:
            there = [i for i, ids in enumerate(values.block_ids) if NO_BLOCK not in ids]
            values = values.chosen(there)
        lengths = dict.fromkeys(values.numbers, size)
        if num_full in lengths:
            lengths[num_full] = keys.tokens_of(num_full)
        counted = [lengths.pop(number, 0) for number in values.numbers]
        return replace(values, num_counted=counted)

    def _of_length(self, num_tokens: int, blocks: BlockRange) -> Values:
        """Returns the values of blocks that all have `num_tokens` tokens."""
        layout, keys = self.layout, self.keys
        parts = layout.owned_parts
        headers = [self._header(part, num_tokens) for part in parts]
        starts = [block.start_of(header)[:-16] for header in headers]  # without the prefix hash
        tables = [self.tables[layout.table_of(part)] for part in parts]
        used = -(-num_tokens // layout.engine_block_tokens)
        step = self._per_block
        firsts = [number * step for number in range(*blocks)]
        count, num_values = len(firsts), len(firsts) * len(parts)
        return Values(
            keys=keys.store_keys(parts, *blocks),
            starts=[start + name for name in keys.hashes(*blocks) for start in starts],
            sizes=[block.HEADER_BYTES + header.payload_bytes for header in headers] * count,
            numbers=[n for n in range(*blocks) for _ in parts],
            parts=[*parts] * count,
            block_ids=[table[at : at + used] for at in firsts for table in tables],
            num_cells=[layout.cells_of(num_tokens)] * num_values,
            num_counted=[0] * num_values,
        )

    def _header(self, part: Part, num_tokens: int) -> block.Header:
        layout = self.layout
        return block.Header(
            flags=block.FLAG_TAIL if num_tokens < layout.block_tokens else 0,
            group=part.group,
            shard=part.shard,
            num_shards=layout.shards_of(part.group),
            num_tokens=num_tokens,
            payload_bytes=layout.payload_bytes(part, num_tokens),
            namespace=self.keys.namespace.digest,
            prefix_hash=bytes(16),
        )


def bytes_of(
    layout: Layout, keys: PromptKeys, first_block: int, layer_range: int | None = None
) -> int:
    """Returns the number of payload bytes of the blocks from `first_block` on."""
    num_tokens = keys.num_tokens - min(first_block * layout.block_tokens, keys.num_tokens)
    parts = layout.parts_of.get(layer_range, ())
    return sum(layout.payload_bytes(part, num_tokens) for part in parts)
