"""Geometry: how many cells and bytes a part has, token by token and in packed pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import Part
from tests.support.kv import flat_layout

FULL, MLA = LayerSpec(8, 128), LayerSpec.latent(576, table=1)
STATE = LayerSpec.state(4100, "bfloat16", table=1)
PAGE = LayerSpec.page(64 * 132, 64, "rows, scales")


def geometry_of(part, **changes):
    given = {"layers": (FULL, MLA, FULL), "block_tokens": 64, "engine_block_tokens": 16}
    made = flat_layout(**{"dtype": "bfloat16", "rope": "", **given, **changes})
    return made.geometry.parts[part]


def test_without_pages_each_token_is_a_cell():
    full, mla = (geometry_of(Part(group, 0)) for group in (0, 1))
    assert (full.layers, full.cache.table, full.cache.cell_bytes) == ((0, 2), 0, 256 * 2)
    assert (mla.layers, mla.cache.table, mla.cache.cell_bytes) == ((1,), 1, 576 * 2)
    assert [full.cache.num_cells(n) for n in (0, 1, 16, 17, 64)] == [0, 1, 16, 17, 64]
    assert full.cache.entry_cells == mla.cache.entry_cells == 16
    assert full.payload_bytes(5) == 2 * 5 * 8 * 256 * 2
    assert mla.payload_bytes(64) == 64 * 576 * 2


def test_a_cell_ends_with_its_scales_so_a_tail_has_those_of_its_tokens_only():
    """K has one and V has one; MLA, which stores no V, has one."""
    full, mla = (replace(spec, scales="float32") for spec in (FULL, MLA))
    parts = [geometry_of(Part(group, 0), layers=(full, mla), dtype="int8") for group in (0, 1)]
    assert [part.cache.cell_bytes for part in parts] == [256 + 2 * 4, 576 + 4]
    assert [part.cache.scales for part in parts] == [("float32", "float32"), ("float32",)]
    assert [part.payload_bytes(1) for part in parts] == [8 * (256 + 8), 576 + 4]
    assert [part.payload_bytes(5) for part in parts] == [5 * 8 * (256 + 8), 5 * (576 + 4)]


def test_a_packed_page_of_one_head_is_one_cell_and_a_tail_has_a_whole_page():
    packed = geometry_of(Part(0, 0), layers=(FULL,) * 3, block_tokens=16, page="packed")
    assert (packed.cache.cell_bytes, packed.cache.entry_cells) == (16 * 256 * 2, 1)
    assert [packed.cache.num_cells(n) for n in (1, 16, 17)] == [1, 1, 2]
    assert packed.payload_bytes(1) == packed.payload_bytes(16) == 3 * 8 * 16 * 256 * 2
    assert packed.num_bytes(1) == packed.payload_bytes(16)


def test_a_layers_page_is_one_cell_and_lies_beside_layers_without_pages():
    """Its bytes are as many as the layer says, whatever the dtype of the others."""
    given = {"layers": (FULL, PAGE, PAGE), "block_tokens": 128, "engine_block_tokens": 64}
    full, page = (geometry_of(Part(group, 0), **given) for group in (0, 1))
    assert (page.layers, page.cache.table, page.cache.cell_bytes) == ((1, 2), 0, 64 * 132)
    assert (page.cache.entry_cells, page.heads) == (1, slice(0, 1))
    assert [page.cache.num_cells(n) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]
    assert [page.cache.cells_before(n) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]
    assert page.payload_bytes(1) == page.payload_bytes(64) == 2 * 64 * 132
    assert full.payload_bytes(1) == 8 * 256 * 2


def test_a_page_of_one_token_is_of_bytes_too():
    page = geometry_of(
        Part(0, 0), layers=(LayerSpec.page(132, 1, "row, scale"),), engine_block_tokens=1
    )
    assert page.payload_bytes(5) == 5 * 132


@pytest.mark.parametrize(("shard", "first_head"), [(2, 0), (3, 2)])
def test_a_shard_has_some_of_the_heads_of_its_rank(shard, first_head):
    part = geometry_of(Part(0, shard), num_shards=4, tp_size=2, tp_rank=1)
    assert (part.first_head, part.num_heads) == (first_head, 2)
    assert part.heads == slice(first_head, first_head + 2)
    assert geometry_of(Part(1, 0), num_shards=4, tp_size=2, tp_rank=1).num_heads == 1


def test_a_state_is_one_cell_however_many_tokens_are_before_its_end():
    changes = {"layers": (FULL, STATE, STATE), "engine_block_tokens": (16, None)}
    state, full = (geometry_of(Part(group, 0), **changes) for group in (1, 0))
    assert (state.layers, state.cache.table, state.cache.cell_bytes) == ((1, 2), 1, 4100)
    assert (state.cache.entry_cells, state.heads) == (1, slice(0, 1))
    assert [state.cache.num_cells(n) for n in (0, 1, 16, 64)] == [0, 1, 1, 1]
    assert state.payload_bytes(1) == state.payload_bytes(64) == 2 * 4100
    assert [state.cache.cells_before(n) for n in (0, 16, 48)] == [0, 0, 0], "all of it is needed"
    assert [full.cache.cells_before(n) for n in (0, 16, 48)] == [0, 16, 48]


def test_a_state_is_no_page_where_the_tokens_are_in_pages():
    given = {"layers": (FULL, STATE), "block_tokens": 16, "engine_block_tokens": (16, None)}
    page, state = (geometry_of(Part(group, 0), page="packed", **given) for group in (0, 1))
    assert (page.cache.cells_before(16), page.payload_bytes(1)) == (1, 8 * 16 * 256 * 2)
    assert (state.num_heads, state.payload_bytes(1)) == (1, 4100)


def test_each_rank_has_its_part_of_a_state_or_all_of_one_that_is_whole():
    part = LayerSpec.state(4100, "f", ranks=2, table=1)
    whole = LayerSpec.state(90, "f", table=1, is_whole=True)
    made = flat_layout(
        dtype="bfloat16",
        rope="",
        layers=(FULL, part, whole),
        block_tokens=64,
        engine_block_tokens=16,
        num_shards=2,
        tp_rank=1,
        tp_size=2,
    )
    assert made.owned_parts == (Part(0, 1), Part(1, 1), Part(2, 0))
    assert [made.payload_bytes(of, 64) for of in made.owned_parts[1:]] == [4100, 90]


def test_only_tables_of_tokens_have_entries_of_so_many_tokens():
    made = flat_layout(
        dtype="bfloat16",
        rope="",
        layers=(FULL, STATE),
        block_tokens=64,
        engine_block_tokens=16,
    ).geometry
    assert (made.tables, made.common_tokens) == ((16, None), 16)
    assert (made.block_entries(0), made.num_entries(0, 17)) == (4, 2)
    for ask in (made.block_entries, lambda table: made.num_entries(table, 17)):
        with pytest.raises(LayoutError, match="block table 1 is of states"):
            ask(1)
