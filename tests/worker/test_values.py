"""Values of a prompt, the ranges that its blocks are split into, and its block tables."""

from __future__ import annotations

import pytest

from pdstore import Layout
from pdstore.errors import LayoutError
from pdstore.format import block
from pdstore.format.layout import NO_BLOCK
from pdstore.worker.values import BlockRange, Split, bytes_of, tables_of
from tests.support.kv import settings_of
from tests.support.values_kit import FULL, SLIDING, prompt_of


def all_of(prompt, layer_range=None):
    return prompt.values(BlockRange(0, len(prompt.keys)), layer_range)


def test_a_header_says_all_that_its_key_asks_for():
    prompt = prompt_of()
    values = all_of(prompt)
    payload_bytes = prompt.layout.payload_bytes(values.parts[1], 64)
    assert block.header_of(values.starts[1]) == block.Header(
        flags=0,
        group=0,
        shard=0,
        num_shards=1,
        num_tokens=64,
        payload_bytes=payload_bytes,
        namespace=prompt.keys.namespace.digest,
        prefix_hash=prompt.keys.hash_of(1),
    )
    assert values.sizes[1] == payload_bytes + block.HEADER_BYTES
    tail = block.header_of(values.starts[-1])
    assert (tail.flags, tail.num_tokens, values.num_counted[-1]) == (block.FLAG_TAIL, 8, 8)


def test_each_block_counts_once():
    prompt = prompt_of(layer_ranges=2, kv_shards=2)
    first, second = (all_of(prompt, number) for number in range(2))
    assert first.num_counted == [64, 0, 64, 0, 64, 0, 8, 0]
    assert second.num_counted == [0] * 8


def test_values_come_apart_into_their_blocks():
    values = all_of(prompt_of(kv_shards=2))
    blocks = list(values.blocks())
    assert [block.numbers for block in blocks] == [[n] * 2 for n in range(4)]
    assert [key for block in blocks for key in block.keys] == values.keys
    assert not list(values[:0].blocks())


def test_values_behind_a_window_are_left_out():
    tables = [range(16), [NO_BLOCK] * 8 + list(range(8))]
    values = all_of(prompt_of(layers=(FULL, SLIDING), tables=tables))
    assert [(n, part.group) for n, part in zip(values.numbers, values.parts, strict=True)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
    ]
    assert values.num_counted == [64, 64, 64, 0, 8, 0]


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


def test_no_blocks_are_one_empty_range():
    assert Split().ranges(4, 4, 0) == [(4, 4)]


def test_the_library_spreads_a_range_itself():
    split = Split.native(64)
    assert split.ranges(0, 100, 127) == [(0, 100)]
    assert len(split.ranges(0, 100, 128)) == 2
    assert split.early_bytes < Split(64).early_bytes


IDS = (4, 5, 6, 7)


def of_layers(*layers):
    return Layout.of(settings_of(), dtype="float32", layers=layers, engine_block_tokens=16, rope="")


def tables(ids, *, layers=(FULL,), num_tokens=64, num_blocks=8, first_block=0):
    return tables_of(of_layers(*layers), num_tokens, ids, num_blocks, first_block)


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
