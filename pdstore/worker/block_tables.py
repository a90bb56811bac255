"""Block tables as callers give them, checked and kept."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import cast

from pdstore.errors import LayoutError
from pdstore.format.layout import NO_BLOCK, BlockTables, Layout

Tables = tuple[tuple[int, ...], ...]


def tables_of(
    layout: Layout,
    num_tokens: int,
    block_ids: Sequence[int] | BlockTables,
    num_blocks: int,
    first_block: int = 0,
) -> Tables:
    """Returns the block tables of a prompt; a plain list of ids is the only one.

    num_blocks: of the paged cache.
    first_block: what belongs to the pool's blocks before it is not checked.
    Raises LayoutError for tables that do not fit.
    """
    tables = _as_tuples(block_ids)
    if len(tables) != layout.num_tables:
        raise LayoutError(f"{len(tables)} block tables; the layout has {layout.num_tables}")
    need = -(-num_tokens // layout.engine_block_tokens)
    first = first_block * layout.block_tokens // layout.engine_block_tokens
    checked = []
    for number, table in enumerate(tables):
        if len(table) < need:
            raise LayoutError(
                f"{num_tokens} tokens need {need} engine blocks; {len(table)} are given"
            )
        used = cast("tuple[int, ...]", table[first:need])
        if not all(type(id) is int for id in used):
            used = _as_ints(used)
            table = (*table[:first], *used)
        lowest = NO_BLOCK if layout.has_window(number) else 0
        if used and not lowest <= min(used) <= max(used) < num_blocks:
            raise LayoutError(
                f"block ids {min(used)}..{max(used)} are not all in the cache of"
                f" {num_blocks} blocks"
            )
        checked.append(table)
    return cast("Tables", tuple(checked))


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


def _as_tuples(block_ids: Iterable[object]) -> tuple[tuple[object, ...], ...]:
    """Reads what was given once, because it may be an iterator."""
    given = tuple(block_ids)
    try:
        is_one_table = not given or operator.index(cast("int", given[0])) is not None
    except TypeError:
        is_one_table = False
    if is_one_table:
        return (given,)
    try:
        return tuple(tuple(cast("Iterable[object]", table)) for table in given)
    except TypeError as error:
        raise LayoutError(f"block ids are ints or lists of ints: {error}") from error


def _as_ints(ids: Sequence[object]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, cast("Sequence[int]", ids)))
    except TypeError as error:
        raise LayoutError(f"block ids are ints: {error}") from error
