"""The values of a prompt's blocks that a job moves: key, header and place in the paged cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pdstore.format import block
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.layout import NO_BLOCK, BlockTables, Layout
from pdstore.format.namespace import Part
from pdstore.worker.block_range import BlockRange
from pdstore.worker.packed_blocks import PackedBlocks, ValueShape
from pdstore.worker.swap.base import BlockCopy
from pdstore.worker.value_run import ValueRun


class Value(NamedTuple):
    """One part of one block.

    number: of the block in its prompt.
    start: the first bytes of the value, `block.start_of` its header.
    size: bytes of the stored value.
    num_tokens: of the block.
    block_ids: the engine blocks that hold the block's tokens.
    num_cells: tokens of the block as block copies see them.
    leads: whether it is the first of its block's values in its list.
    counts: whether it is the first of its block's values on this rank.
    """

    number: int
    part: Part
    key: BlockKey
    start: bytes
    size: int
    num_tokens: int
    block_ids: Sequence[int]
    num_cells: int
    leads: bool
    counts: bool

    def __str__(self) -> str:
        return self.key

    @property
    def header(self) -> block.Header:
        return block.header_of(self.start)

    def block_copy(self, value: memoryview, before: int = 0) -> BlockCopy:
        """Returns the block copy between this value's bytes and the paged cache.

        before: tokens of the block that a scatter leaves alone.
        """
        payload = value[block.HEADER_BYTES :]
        return BlockCopy(self.part, self.block_ids, self.num_cells, before, payload)


class Chain(NamedTuple):
    """The store's keys of blocks in order, and each key's block by its number in the prompt."""

    keys: Sequence[BlockKey]
    numbers: Sequence[int]


class PromptBlocks:
    """The blocks of one prompt that this rank moves, and where they are in the paged cache.

    keys, tables: not changed any more by anybody.
    """

    def __init__(self, layout: Layout, keys: PromptKeys, tables: BlockTables) -> None:
        self.layout, self.keys, self.tables = layout, keys, tables
        self._per_block = layout.block_tokens // layout.engine_block_tokens
        self._shapes: dict[int, list[ValueShape]] = {}  # by a block's tokens; of each owned part
        self._packed: dict[int | None, PackedBlocks] = {}  # by layer range
        self._packing = threading.Lock()

    def values(self, blocks: BlockRange, layer_range: int | None = None) -> Sequence[Value]:
        """The values of some blocks, in key order; of one layer range, or of all layers.

        Those are left out whose engine blocks are not all there.
        """
        num_full = self.keys.num_tokens // self.layout.block_tokens
        if not self.layout.has_windows and blocks.first < blocks.stop <= num_full:
            return self._run(blocks, layer_range)
        full = BlockRange(blocks.first, min(blocks.stop, num_full))
        values = self._values(full, self.layout.block_tokens, layer_range)
        if blocks.first <= num_full < blocks.stop:
            tail = BlockRange(num_full, num_full + 1)
            values += self._values(tail, self.keys.tokens_of(num_full), layer_range)
        return values

    def usable_end(self, end: int, first_token: int) -> int:
        """Returns how many of the first `end` tokens an engine can go on from.

        It can from all of the prompt, from `first_token`, and from the end of a block before which
        no window lacks an engine block.
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

    def chain(self, first_block: int, layer_range: int | None = None) -> Chain:
        """The keys of the blocks from `first_block` on, without making their values."""
        blocks = BlockRange(first_block, len(self.keys))
        if self.layout.has_windows:
            values = self.values(blocks, layer_range)
            return Chain([value.key for value in values], [value.number for value in values])
        parts = [
            part
            for part in self.layout.owned_parts
            if layer_range is None or self.layout.range_of_part(part) == layer_range
        ]
        numbers = [number for number in range(*blocks) for _ in parts]
        return Chain(self.keys.store_keys(parts, first_block), numbers)

    def _run(self, blocks: BlockRange, layer_range: int | None) -> ValueRun:
        layout = self.layout
        counts = layer_range is None or layout.range_of_part(layout.owned_parts[0]) == layer_range
        per_block = sum(self._is_wanted(layer_range))
        return ValueRun(
            blocks.first * per_block,
            blocks.stop * per_block,
            per_block,
            layout.block_tokens if counts else 0,
            lambda some: self._values(some, layout.block_tokens, layer_range),
            partial(self._pack, layer_range),
        )

    def _pack(self, layer_range: int | None) -> PackedBlocks:
        """Packs the full blocks once; the workers of a job share them."""
        with self._packing:
            packed = self._packed.get(layer_range)
            if packed is None:
                num_tokens = self.layout.block_tokens
                shapes = zip(self._shapes_of(num_tokens), self._is_wanted(layer_range), strict=True)
                packed = self._packed[layer_range] = PackedBlocks(
                    self.keys,
                    [shape for shape, is_wanted in shapes if is_wanted],
                    self._per_block,
                    self.layout.cells_of(num_tokens),
                )
        return packed

    def _is_wanted(self, layer_range: int | None) -> list[bool]:
        """Tells for each owned part if it is of a layer range."""
        layout = self.layout
        return [
            layer_range is None or layout.range_of_part(part) == layer_range
            for part in layout.owned_parts
        ]

    def _values(self, blocks: BlockRange, num_tokens: int, layer_range: int | None) -> list[Value]:
        """The values of blocks that all have `num_tokens` tokens."""
        layout, keys = self.layout, self.keys
        shapes = self._shapes_of(num_tokens)
        wanted = self._is_wanted(layer_range)
        names = iter(keys.store_keys(layout.owned_parts, *blocks))
        step, cells = self._per_block, layout.cells_of(num_tokens)
        used = -(-num_tokens // layout.engine_block_tokens)
        may_lack = layout.has_windows
        values: list[Value] = []
        for number in range(*blocks):
            at, prefix_hash = number * step, keys.hash_of(number)
            leads = counts = True
            for (part, table, start, size), is_wanted in zip(shapes, wanted, strict=True):
                key = next(names)
                ids = table[at : at + used]
                if may_lack and NO_BLOCK in ids:
                    continue
                if is_wanted:
                    values.append(
                        Value(
                            number,
                            part,
                            key,
                            start + prefix_hash,
                            size,
                            num_tokens,
                            ids,
                            cells,
                            leads,
                            counts,
                        )
                    )
                    leads = False
                counts = False
        return values

    def _shapes_of(self, num_tokens: int) -> list[ValueShape]:
        """The shapes of all owned parts; they are kept, because each share of a job asks again."""
        shapes = self._shapes.get(num_tokens)
        if shapes is None:
            shapes = [self._shape(part, num_tokens) for part in self.layout.owned_parts]
            self._shapes[num_tokens] = shapes
        return shapes

    def _shape(self, part: Part, num_tokens: int) -> ValueShape:
        layout = self.layout
        payload_bytes = layout.payload_bytes(part, num_tokens)
        header = block.Header(
            flags=block.FLAG_TAIL if num_tokens < layout.block_tokens else 0,
            group=part.group,
            shard=part.shard,
            num_shards=layout.shards_of(part.group),
            num_tokens=num_tokens,
            payload_bytes=payload_bytes,
            namespace=self.keys.namespace.digest,
            prefix_hash=bytes(16),
        )
        start = block.start_of(header)[:-16]
        table = self.tables[layout.table_of(part)]
        return ValueShape(part, table, start, block.HEADER_BYTES + payload_bytes)


def keys_of(values: Sequence[Value]) -> list[BlockKey]:
    """Returns the store's keys of values."""
    if isinstance(values, ValueRun):
        return values.packed.keys(values.first, values.stop)
    return [value.key for value in values]


def whole_blocks(values: Sequence[Value], count: int) -> int:
    """Returns how many of the first `count` values make up whole blocks."""
    if isinstance(values, ValueRun):
        return values.whole(count)
    while 0 < count < len(values) and not values[count].leads:
        count -= 1
    return count


def counted_tokens(values: Sequence[Value]) -> int:
    """Returns the tokens of these values' blocks, each block once over all its values."""
    if isinstance(values, ValueRun):
        return values.num_counted_tokens
    return sum(value.num_tokens for value in values if value.counts)


def block_at(values: Sequence[Value], index: int) -> int:
    """Returns the number of the block that a value is of, without making the value."""
    if isinstance(values, ValueRun):
        return (values.first + index) // values.per_block
    return values[index].number


def end_token(values: Sequence[Value], block_tokens: int) -> int:
    """Returns the prompt's tokens up to the end of the last value's block."""
    if isinstance(values, ValueRun):
        return values.blocks.stop * block_tokens
    return values[-1].number * block_tokens + values[-1].num_tokens


def bytes_of(
    layout: Layout, keys: PromptKeys, first_block: int, layer_range: int | None = None
) -> int:
    """Payload bytes of the blocks from `first_block` on, without making their values."""
    num_tokens = keys.num_tokens - min(first_block * layout.block_tokens, keys.num_tokens)
    return sum(
        layout.payload_bytes(part, num_tokens)
        for part in layout.owned_parts
        if layer_range is None or layout.range_of_part(part) == layer_range
    )
