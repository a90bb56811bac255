"""PromptBlocks: the blocks of a prompt that a job moves, and the values of these blocks."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdstore.format import block
from pdstore.format.continuation import NO_BLOCK, BlockTables
from pdstore.format.keys import Part, PromptKeys
from pdstore.format.layout import Layout
from pdstore.format.values import BlockRange, Values

Tables = tuple[Sequence[int], ...]


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

    def values(self, blocks: BlockRange, layer_range: int | None = None) -> Values:
        """Returns the values of some blocks, of one layer range or (None) of all layers.

        A value is left out if one of its engine blocks is not there (NO_BLOCK).
        """
        with self._making:  # all workers of a job use the same columns
            values = self._of_layers(layer_range)
        first, stop = (bisect_left(values.numbers, number) for number in blocks)
        return values[first:stop]

    def usable_end(self, end: int, first_token: int) -> int:
        """Returns the largest number of tokens, up to `end`, after which an engine can go on.

        An engine can go on from the end of the prompt, from `first_token` tokens, and from the end
        of each block where the block tables have all engine blocks that it needs.
        """
        if end == self.keys.num_tokens:
            return end
        return self.layout.continuation.usable_end(self.tables, end, first_token)

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
        if not self.layout.continuation.needs_all:
            there = [i for i, ids in enumerate(values.block_ids) if NO_BLOCK not in ids]
            values = values.chosen(there)
        lengths = dict.fromkeys(values.numbers, size)
        if num_full in lengths:
            lengths[num_full] = keys.tokens_of(num_full)
        counted = [lengths.pop(number, 0) for number in values.numbers]
        return replace(values, num_counted=counted)

    def _of_length(self, num_tokens: int, blocks: BlockRange) -> Values:
        """Returns the values of blocks that all have `num_tokens` tokens."""
        keys = self.keys
        geometry = self.layout.geometry
        parts = [*geometry.parts]
        caches = [of.cache for of in geometry.parts.values()]
        headers = [self._header(part, num_tokens) for part in parts]
        starts = [block.start_of(header)[:-16] for header in headers]  # without the prefix hash
        entries = {
            number: self._entries(number, num_tokens, blocks)
            for number in {cache.table for cache in caches}
        }
        count = len(range(*blocks))
        return Values(
            keys=keys.store_keys(parts, *blocks),
            header_prefixes=[start + name for name in keys.hashes(*blocks) for start in starts],
            sizes=[block.HEADER_BYTES + header.payload_bytes for header in headers] * count,
            numbers=[n for n in range(*blocks) for _ in parts],
            parts=parts * count,
            block_ids=[entries[of.table][i] for i in range(count) for of in caches],
            num_cells=[cache.num_cells(num_tokens) for cache in caches] * count,
            num_counted=[0] * (count * len(parts)),
        )

    def _entries(self, table: int, num_tokens: int, blocks: BlockRange) -> list[Sequence[int]]:
        """Returns for each block the entries of a block table that hold its `num_tokens` tokens."""
        geometry = self.layout.geometry
        ids = self.tables[table]
        step = geometry.block_entries(table)
        used = geometry.num_entries(table, num_tokens)
        return [ids[number * step : number * step + used] for number in range(*blocks)]

    def _header(self, part: Part, num_tokens: int) -> block.Header:
        layout = self.layout
        return block.Header(
            flags=block.FLAG_TAIL if num_tokens < layout.block_tokens else 0,
            group=part.group,
            shard=part.shard,
            num_shards=layout.identity.shards_of(part.group),
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
