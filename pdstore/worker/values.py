"""What a job moves: values of a prompt's blocks, with key, header and place in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from pdstore.errors import LayoutError
from pdstore.format import block
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.format.layout import NO_BLOCK, BlockTables, Layout
from pdstore.format.namespace import Part
from pdstore.worker.swap.base import BlockCopy


class Value(NamedTuple):
    """One part of one block.

    number: of the block in its prompt.
    block_ids: the engine blocks that hold the block's tokens.
    num_cells: tokens of the block as block copies see them.
    leads: it is the first value of its block in the job.
    """

    number: int
    part: Part
    key: BlockKey
    header: block.Header
    block_ids: Sequence[int]
    num_cells: int
    leads: bool

    @property
    def size(self) -> int:
        """Bytes of the stored value."""
        return block.HEADER_BYTES + self.header.payload_bytes

    def block_copy(self, value: memoryview, before: int = 0) -> BlockCopy:
        """The block copy between this value's bytes and the paged cache.

        before: tokens of the block that a scatter leaves alone.
        """
        payload = value[block.HEADER_BYTES :]
        return BlockCopy(self.part, self.block_ids, self.num_cells, before, payload)


def tables_of(
    layout: Layout,
    num_tokens: int,
    block_ids: Sequence[int] | BlockTables,
    num_blocks: int,
) -> tuple[tuple[int, ...], ...]:
    """The block tables of a prompt, of which a plain list of ids is the only one.

    num_blocks: of the paged cache. Raises LayoutError for tables that do not fit.
    """
    if isinstance(next(iter(block_ids), 0), int):
        block_ids = [cast("Sequence[int]", block_ids)]
    tables = tuple(tuple(table) for table in cast("BlockTables", block_ids))
    if len(tables) != layout.num_tables:
        raise LayoutError(f"{len(tables)} block tables; the layout has {layout.num_tables}")
    need = -(-num_tokens // layout.engine_block_tokens)
    for number, table in enumerate(tables):
        if len(table) < need:
            raise LayoutError(
                f"{num_tokens} tokens need {need} engine blocks; {len(table)} are given"
            )
        used = table[:need]
        lowest = NO_BLOCK if layout.has_window(number) else 0
        if used and not lowest <= min(used) <= max(used) < num_blocks:
            raise LayoutError(
                f"block ids {min(used)}..{max(used)} are not all in the cache of"
                f" {num_blocks} blocks"
            )
    return tables


def check_windows(layout: Layout, tables: BlockTables) -> None:
    """Raises LayoutError where a block to be loaded reaches over a window's edge."""
    per_block = layout.block_tokens // layout.engine_block_tokens
    for table in tables:
        num_gone = len(table) - table[::-1].index(NO_BLOCK) if NO_BLOCK in table else 0
        if num_gone % per_block:
            raise LayoutError(
                f"a window begins inside a block of {layout.block_tokens} tokens: the pool's block"
                f" must be the engine's, of {layout.engine_block_tokens}"
            )


def values_of(
    layout: Layout, keys: PromptKeys, tables: BlockTables, first_block: int
) -> list[Value]:
    """The values that this rank owns of the blocks from `first_block` on, in key order.

    Those are left out whose engine blocks are not all there.
    """
    parts = [(part, tables[layout.table_of(part)]) for part in layout.owned_parts]
    per_block = layout.block_tokens // layout.engine_block_tokens
    names = iter(keys.store_keys(layout.owned_parts, first_block))
    values: list[Value] = []
    for number in range(first_block, len(keys)):
        num_tokens = keys.tokens_of(number)
        used = -(-num_tokens // layout.engine_block_tokens)
        for part, table in parts:
            key = next(names)
            ids = table[number * per_block : number * per_block + used]
            if NO_BLOCK in ids:
                continue
            header = block.Header(
                flags=block.FLAG_TAIL if num_tokens < layout.block_tokens else 0,
                group=part.group,
                shard=part.shard,
                num_shards=layout.shards_of(part.group),
                num_tokens=num_tokens,
                payload_bytes=layout.payload_bytes(part, num_tokens),
                namespace=keys.namespace.digest,
                prefix_hash=keys.hash_of(number),
            )
            leads = not values or values[-1].number != number
            cells = layout.cells_of(num_tokens)
            values.append(Value(number, part, key, header, ids, cells, leads))
    return values


def whole_blocks(values: Sequence[Value], count: int) -> int:
    """How many of the first `count` values belong to blocks whose values are all among them."""
    while 0 < count < len(values) and not values[count].leads:
        count -= 1
    return count


def bytes_of(layout: Layout, keys: PromptKeys, first_block: int) -> int:
    """Payload bytes of `values_of(...)`, without making them."""
    num_tokens = keys.num_tokens - min(first_block * layout.block_tokens, keys.num_tokens)
    return sum(layout.payload_bytes(part, num_tokens) for part in layout.owned_parts)
