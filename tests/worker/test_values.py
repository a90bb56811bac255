"""PromptBlocks: each value's key, header and place, for any share of a prompt."""

from __future__ import annotations

import pytest

from pdstore.format import block
from pdstore.format.layout import NO_BLOCK
from pdstore.worker.values import BlockRange, bytes_of
from tests.support.values_kit import FULL, SLIDING, prompt_of


def all_of(prompt, layer_range=None):
    return prompt.values(BlockRange(0, len(prompt.keys)), layer_range)


def test_values_come_in_key_order_with_the_keys_of_the_store():
    prompt = prompt_of(kv_shards=2, layer_ranges=2)
    keys = prompt.keys.store_keys(prompt.layout.owned_parts)
    assert all_of(prompt).keys == keys
    assert all_of(prompt).numbers == [n for n in range(4) for _ in range(4)]


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


def test_a_value_knows_its_engine_blocks():
    values = all_of(prompt_of())
    assert list(values.block_ids[1]) == [104, 105, 106, 107]
    assert list(values.block_ids[-1]) == [112]


@pytest.mark.parametrize("blocks", [(0, 2), (1, 4), (3, 4), (2, 2)])
def test_a_range_has_the_values_of_its_blocks(blocks):
    prompt = prompt_of(layer_ranges=2)
    values = all_of(prompt)
    want = [i for i, number in enumerate(values.numbers) if number in range(*blocks)]
    assert prompt.values(BlockRange(*blocks)) == values.chosen(want)


def test_layer_ranges_together_are_all_values():
    prompt = prompt_of(layer_ranges=2)
    halves = [all_of(prompt, number) for number in range(2)]
    assert sorted([*halves[0].keys, *halves[1].keys]) == sorted(all_of(prompt).keys)
    assert all(prompt.layout.range_of_part(part) == 1 for part in halves[1].parts)


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
