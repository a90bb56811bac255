"""PackedBlocks: each slice is what packing its values one by one gives."""

from __future__ import annotations

from array import array

import pytest

from pdstore.native.arena import text_of
from pdstore.worker.block_range import BlockRange
from tests.support.values_kit import prompt_of


@pytest.mark.parametrize("layer_range", [None, 0, 1])
@pytest.mark.parametrize("kv_shards", [1, 2])
def test_a_slice_is_what_its_values_are_one_by_one(layer_range, kv_shards):
    prompt = prompt_of(layer_ranges=2, kv_shards=kv_shards)
    run = prompt.values(BlockRange(0, 3), layer_range)
    packed, values = run.packed, list(run)
    for first in range(len(values)):
        for stop in range(first + 1, len(values) + 1):
            some = values[first:stop]
            assert packed.names(first, stop) == text_of([value.key for value in some])
            assert packed.starts(first, stop) == b"".join(value.start for value in some)
            sizes = array("q", [value.size for value in some])
            assert packed.sizes(first, stop) == sizes.tobytes()
            ids = array("q", [number for value in some for number in value.block_ids])
            assert packed.ids(first, stop) == ids.tobytes()


def test_a_prompt_is_packed_once_for_all_its_runs():
    prompt = prompt_of()
    one, other = (prompt.values(BlockRange(*blocks)) for blocks in ((0, 1), (1, 3)))
    assert one.packed is other.packed
    assert (one.blocks, other.blocks) == (BlockRange(0, 1), BlockRange(1, 3))
