"""PromptBlocks: the blocks of a prompt that a job moves, their values, and their block tables."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

from pdstore.errors import LayoutError
from pdstore.format import block
from pdstore.format.continuation import NO_BLOCK, BlockTable, BlockTables
from pdstore.format.keys import Part, PromptKeys
from pdstore.format.layout import Layout
from pdstore.format.values import BlockRange, Values

Tables: TypeAlias = tuple[BlockTable, ...]


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
    _every: Values | None = field(default=None, init=False)  # drafts too
    _made: dict[int | None, Values] = field(default_factory=dict, init=False)  # by layer range
    _making: threading.Lock = field(default_factory=threading.Lock, init=False)

    def values(self, blocks: BlockRange, layer_range: int | None = None) -> Values:
        """Returns the values of some blocks, of one layer range or (None) of all but drafts.

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
            values = self._every = self._every or self._all()
            if layer_range is not None or self.layout.draft_range is not None:
                parts = self.layout.parts_of.get(layer_range, ())
                values = values.chosen([i for i, part in enumerate(values.parts) if part in parts])
            self._made[layer_range] = values
        return values

    def _all(self) -> Values:
        size, keys = self.layout.block_tokens, self.keys
        num_full = keys.num_tokens // size
        runs = self._runs(min(self.first, num_full), num_full)
        pieces = [self._of_length(size, run) for run in runs]
        if len(keys) > num_full:
            tail = BlockRange(num_full, num_full + 1)
            pieces.append(self._of_length(keys.tokens_of(num_full), tail))
        values = Values.joined(pieces)
        windows = self.layout.continuation.needs.keys() - self.layout.continuation.states
        if any(NO_BLOCK in self.tables[number] for number in windows):
            there = [i for i, ids in enumerate(values.block_ids) if NO_BLOCK not in ids]
            values = values.chosen(there)
        lengths = dict.fromkeys(values.numbers, size)
        if num_full in lengths:
            lengths[num_full] = keys.tokens_of(num_full)
        counted = [lengths.pop(number, 0) for number in values.numbers]
        return replace(values, num_counted=counted)

    def _runs(self, first: int, stop: int) -> list[BlockRange]:
        """Splits full blocks into runs: a block that ends at a state is a run of its own.

        So no value is made of states that are not there: in a long prompt, these would be most.
        """
        size = self.layout.block_tokens
        ends = {end for table in self.tables if isinstance(table, Mapping) for end in table}
        numbers = [end // size - 1 for end in ends if end % size == 0]
        inside = {at for n in numbers if first <= n < stop for at in (n, n + 1)}
        edges = sorted({first, stop, *inside})
        return [BlockRange(*run) for run in pairwise(edges)] or [BlockRange(first, stop)]

    def _of_length(self, num_tokens: int, blocks: BlockRange) -> Values:
        """Returns the values of blocks that all have `num_tokens` tokens.

        The parts of a block table that has nothing for these blocks are left out.
        """
        keys = self.keys
        geometry = self.layout.geometry
        tables = {of.cache.table for of in geometry.parts.values()}
        entries = {number: self._entries(number, num_tokens, blocks) for number in tables}
        there = {n for n, of in entries.items() if any(NO_BLOCK not in ids for ids in of)}
        parts = [part for part, of in geometry.parts.items() if of.cache.table in there]
        caches = [geometry.parts[part].cache for part in parts]
        headers = [self._header(part, num_tokens) for part in parts]
        starts = [block.start_of(header)[:-16] for header in headers]  # without the prefix hash
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
        """Returns for each block the entries of a block table that hold its `num_tokens` tokens.

        Of a table of states that is the entry with the state at the block's end, or NO_BLOCK.
        """
        geometry = self.layout.geometry
        ids = self.tables[table]
        if isinstance(ids, Mapping):
            ends = (number * geometry.block_tokens + num_tokens for number in range(*blocks))
            return [[ids.get(end, NO_BLOCK)] for end in ends]
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
            namespace=self.keys.namespace.header_digest(part),
            prefix_hash=bytes(16),
        )


def bytes_of(
    layout: Layout, keys: PromptKeys, first_block: int, layer_range: int | None = None
) -> int:
    """Returns the payload bytes of the blocks from `first_block` on, of all layers but drafts'.

    layer_range: counts only this one, which may be that of the drafts.
    """
    num_tokens = keys.num_tokens - min(first_block * layout.block_tokens, keys.num_tokens)
    parts = layout.parts_of.get(layer_range, ())
    return sum(layout.payload_bytes(part, num_tokens) for part in parts)


def tables_of(
    layout: Layout,
    num_tokens: int,
    block_ids: Sequence[int] | BlockTables,
    num_blocks: Mapping[int, int],
    first_block: int = 0,
) -> Tables:
    """Returns the block tables of a prompt; a plain list of ids stands for a single table.

    Tables that are arrays of int64 are not copied, so nobody may change them.
    num_blocks: as in `Swap`; a table without a number is not checked, as nothing of it is copied.
    first_block: index of the first block of this job; table entries before it are not checked.
    Raises LayoutError for tables that do not fit.
    """
    given: Any = tuple(block_ids)  # read a single time, because it may be an iterator
    tables: Tables
    try:
        tables = (tuple(map(operator.index, given)),)
    except TypeError:
        try:
            tables = tuple(map(_copied, given))
        except TypeError as error:
            raise LayoutError(f"block ids are ints or lists of ints: {error}") from error
    if len(tables) != len(layout.geometry.tables):
        raise LayoutError(
            f"{len(tables)} block tables; the layout has {len(layout.geometry.tables)}"
        )
    for number, table in enumerate(tables):
        used = _used_entries(layout, number, table, num_tokens, first_block)
        may_lack = number in layout.continuation.needs and not isinstance(table, Mapping)
        lowest = NO_BLOCK if may_lack else 0
        limit = num_blocks.get(number)
        if used and limit is not None and not lowest <= min(used) <= max(used) < limit:
            raise LayoutError(
                f"block ids {min(used)}..{max(used)} are not all in the cache of {limit} blocks"
            )
    return tables


def _copied(table: Any) -> BlockTable:  # noqa: ANN401
    if isinstance(table, Mapping):
        return {operator.index(end): operator.index(entry) for end, entry in table.items()}
    return table if getattr(table, "typecode", "") == "q" else tuple(map(operator.index, table))


def _used_entries(
    layout: Layout, number: int, table: BlockTable, num_tokens: int, first_block: int
) -> Sequence[int]:
    """Returns the entries of a table that a job may use. Raises LayoutError if it does not fit."""
    if isinstance(table, Mapping) != (number in layout.continuation.states):
        raise LayoutError(
            f"block table {number}: a table of states is a mapping from numbers of tokens to its"
            " entries, and any other table is a list of its entries"
        )
    if isinstance(table, Mapping):
        _check_ends(number, table, num_tokens, layout.block_tokens)
        return [*table.values()]
    need = layout.geometry.num_entries(number, num_tokens)
    if len(table) < need:
        raise LayoutError(f"{num_tokens} tokens need {need} engine blocks; {len(table)} are given")
    return table[first_block * layout.geometry.block_entries(number) : need]


def _check_ends(number: int, table: Mapping[int, int], num_tokens: int, block_tokens: int) -> None:
    """Raises LayoutError for a state after which no block ends, and for two states in one entry."""
    for end in table:
        if not 0 < end <= num_tokens or (end % block_tokens and end != num_tokens):
            raise LayoutError(
                f"block table {number}: no block ends after {end} of {num_tokens} tokens, so the"
                f" state there has no key; name states only after each {block_tokens} tokens and"
                " after the last token"
            )
    if len(set(table.values())) < len(table):
        raise LayoutError(
            f"block table {number} names an entry for two ends, {dict(table)}: it can hold the"
            " state of only one"
        )
