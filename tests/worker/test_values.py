"""Values of a prompt, the ranges that its blocks are split into, and its block tables."""

from __future__ import annotations

import pytest

from pdstore import LayerSpec, Layout, PromptKeys
from pdstore.errors import LayoutError
from pdstore.format import block
from pdstore.format.layout import NO_BLOCK
from pdstore.worker.pool import tables_of
from pdstore.worker.values import BlockRange, PromptBlocks, Split, bytes_of
from tests.support.kv import settings_of

FULL = LayerSpec(2, 8)


def layout_of(*layers, settings):
    return Layout.of(settings, dtype="float32", layers=layers, engine_block_tokens=16, rope="")


def prompt_of(**changes):
    """Returns a prompt of three full blocks and a tail; `changes`: settings."""
    settings = settings_of(**changes)
    layout = layout_of(*[FULL] * 4, settings=settings)
    keys = PromptKeys(layout.namespace(settings, weights="w")).extend(range(200))
    return PromptBlocks(layout, keys, [range(100, 120)])


def all_of(prompt, layer_range=None):
    return prompt.values(BlockRange(0, len(prompt.keys)), layer_range)


def test_each_block_counts_once():
    prompt = prompt_of(layer_ranges=2, kv_shards=2)
    first, second = (all_of(prompt, number) for number in range(2))
    assert first.num_counted == [64, 0, 64, 0, 64, 0, 8, 0]
    assert second.num_counted == [0] * 8


@pytest.mark.parametrize(("count", "whole"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (8, 8)])
def test_whole_blocks_have_all_their_values(count, whole):
    assert all_of(prompt_of(kv_shards=2)).num_whole(count) == whole


@pytest.mark.parametrize("first_block", [0, 1, 3, 4])
@pytest.mark.parametrize("layer_range", [None, 0, 1])
def test_bytes_are_those_of_the_payloads(first_block, layer_range):
    prompt = prompt_of(layer_ranges=2)
    values = prompt.values(BlockRange(first_block, 4), layer_range)
    want = sum(size - block.HEADER_BYTES for size in values.sizes)
    assert bytes_of(prompt.layout, prompt.keys, first_block, layer_range) == want


def test_ranges_are_even_and_in_order():
    assert Split(1).ranges(2, 12, 3) == [(2, 5), (5, 8), (8, 12)]
    assert Split(1).ranges(0, 2, 10) == [(0, 1), (1, 2)]


def test_few_bytes_are_one_range():
    assert Split(64).ranges(0, 100, 15) == [(0, 100)]
    assert len(Split(64).ranges(0, 100, 16)) == 2


def test_less_than_eight_whole_ranges_are_split_into_eight():
    assert len(Split(64).ranges(0, 100, 64)) == 8
    assert len(Split(64).ranges(0, 100, 8 * 64)) == 8
    assert len(Split(64).ranges(0, 100, 9 * 64)) == 9


def test_the_library_spreads_a_range_itself():
    split = Split.native(64)
    assert split.ranges(0, 100, 127) == [(0, 100)]
    assert len(split.ranges(0, 100, 128)) == 2
    assert split.early_bytes < Split(64).early_bytes


IDS = (4, 5, 6, 7)


def tables(ids, *, layers=(FULL,), num_tokens=64, num_blocks=8, first_block=0):
    return tables_of(
        layout_of(*layers, settings=settings_of()), num_tokens, ids, num_blocks, first_block
    )


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        ((1, 2, 3), "need 4 engine blocks; 3 are given"),
        ((1, 2, 3, 8), "not all in the cache of 8"),
        ((NO_BLOCK, 1, 2, 3), "not all in the cache"),
        ([IDS, IDS], "2 block tables; the layout has 1"),
        ([1.0] * 4, "ints"),
        (["a"], "need 4|ints"),
        ([None] * 4, "ints"),
    ],
)
def test_tables_that_do_not_fit_are_refused(ids, word):
    with pytest.raises(LayoutError, match=word):
        tables(ids)


def test_ids_before_the_first_block_are_not_looked_at():
    ids = (-9, -9, -9, -9, 1, 2, 3, 4)
    assert tables(ids, num_tokens=128, first_block=1) == (ids,)
    with pytest.raises(LayoutError):
        tables(ids, num_tokens=128)
