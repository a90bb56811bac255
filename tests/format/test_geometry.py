"""Geometry: how many cells and bytes a part has, token by token and in packed pages."""

from __future__ import annotations

import pytest

from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec
from pdstore.format.keys import Part
from tests.support.kv import flat_layout

FULL, MLA = LayerSpec(8, 128), LayerSpec(1, 576, value_dim=0, kind="mla", table=1)


def geometry_of(part, **changes):
    given = {"layers": (FULL, MLA, FULL), "block_tokens": 64, "engine_block_tokens": 16}
    made = flat_layout(dtype="bfloat16", rope="", **{**given, **changes})
    return made.geometry.parts[part]


def test_without_pages_each_token_is_a_cell():
    full, mla = (geometry_of(Part(group, 0)) for group in (0, 1))
    assert (full.layers, full.cache.table, full.cache.cell_bytes) == ((0, 2), 0, 256 * 2)
    assert (mla.layers, mla.cache.table, mla.cache.cell_bytes) == ((1,), 1, 576 * 2)
    assert [full.cache.num_cells(n) for n in (0, 1, 16, 17, 64)] == [0, 1, 16, 17, 64]
    assert full.cache.entry_cells == mla.cache.entry_cells == 16
    assert full.payload_bytes(5) == 2 * 5 * 8 * 256 * 2
    assert mla.payload_bytes(64) == 64 * 576 * 2


def test_a_packed_page_of_one_head_is_one_cell_and_a_tail_has_a_whole_page():
    packed = geometry_of(Part(0, 0), layers=(FULL,) * 3, block_tokens=16, page="packed")
    assert (packed.cache.cell_bytes, packed.cache.entry_cells) == (16 * 256 * 2, 1)
    assert [packed.cache.num_cells(n) for n in (1, 16, 17)] == [1, 1, 2]
    assert packed.payload_bytes(1) == packed.payload_bytes(16) == 3 * 8 * 16 * 256 * 2
    assert packed.num_bytes(1) == packed.payload_bytes(16)


@pytest.mark.parametrize(("shard", "first_head"), [(2, 0), (3, 2)])
def test_a_shard_has_some_of_the_heads_of_its_rank(shard, first_head):
    part = geometry_of(Part(0, shard), num_shards=4, tp_size=2, tp_rank=1)
    assert (part.first_head, part.num_heads) == (first_head, 2)
    assert part.heads == slice(first_head, first_head + 2)
    assert geometry_of(Part(1, 0), num_shards=4, tp_size=2, tp_rank=1).num_heads == 1


@pytest.mark.parametrize("num_pieces", [1, 2, 6])
def test_a_page_in_pieces_has_as_many_bytes_as_its_layers_and_heads(num_pieces):
    changes = {"layers": (FULL,) * 3, "block_tokens": 16, "page": "x", "num_shards": 2}
    whole = geometry_of(Part(0, 1), tp_size=2, tp_rank=1, **changes)
    split = geometry_of(Part(0, 1), tp_size=2, tp_rank=1, num_pieces=num_pieces, **changes)
    assert (split.layers, split.heads) == (tuple(range(num_pieces)), slice(0, 1))
    assert split.cache.cell_bytes * num_pieces == whole.payload_bytes(16) == split.payload_bytes(1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"page": "x", "block_tokens": 16}, {"layers": (FULL,), "page": None}],
    ids=["layers that differ", "pages of layers that differ", "no pages"],
)
def test_what_is_in_pieces_is_pages_of_equal_layers(changes):
    with pytest.raises(LayoutError, match="only pages of equal layers"):
        geometry_of(Part(0, 0), num_pieces=2, **changes)
