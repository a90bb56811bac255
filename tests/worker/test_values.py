"""PromptBlocks: each value's key, header and place, for any share of a prompt."""

from __future__ import annotations

import pytest

from pdstore.format import block
from pdstore.format.layout import NO_BLOCK
from pdstore.worker.block_range import BlockRange
from pdstore.worker.values import bytes_of, whole_blocks
from tests.support.values_kit import FULL, SLIDING, prompt_of


def all_of(prompt, layer_range=None):
    return prompt.values(BlockRange(0, len(prompt.keys)), layer_range)


def test_values_come_in_key_order_with_the_keys_of_the_store():
    prompt = prompt_of(kv_shards=2, layer_ranges=2)
    keys = prompt.keys.store_keys(prompt.layout.owned_parts)
    assert [value.key for value in all_of(prompt)] == keys
    assert [value.number for value in all_of(prompt)] == [n for n in range(4) for _ in range(4)]


def test_a_header_says_all_that_its_key_asks_for():
    prompt = prompt_of()
    full, tail = all_of(prompt)[1], all_of(prompt)[-1]
    payload_bytes = prompt.layout.payload_bytes(full.part, 64)
    assert full.header == block.Header(
        flags=0,
        group=0,
        shard=0,
        num_shards=1,
        num_tokens=64,
        payload_bytes=payload_bytes,
        namespace=prompt.keys.namespace.digest,
        prefix_hash=prompt.keys.hash_of(1),
    )
    assert full.size == payload_bytes + block.HEADER_BYTES
    assert (tail.header.flags, tail.header.num_tokens, tail.num_tokens) == (block.FLAG_TAIL, 8, 8)


def test_a_value_knows_its_engine_blocks():
    values = all_of(prompt_of())
    assert list(values[1].block_ids) == [104, 105, 106, 107]
    assert list(values[-1].block_ids) == [112]


@pytest.mark.parametrize("blocks", [(0, 2), (1, 4), (3, 4), (2, 2)])
def test_a_range_has_the_values_of_its_blocks(blocks):
    prompt = prompt_of(layer_ranges=2)
    want = [value for value in all_of(prompt) if value.number in range(*blocks)]
    assert list(prompt.values(BlockRange(*blocks))) == want


def test_layer_ranges_together_are_all_values():
    prompt = prompt_of(layer_ranges=2)
    halves = [all_of(prompt, number) for number in range(2)]
    assert sorted(v.key for half in halves for v in half) == sorted(v.key for v in all_of(prompt))
    assert all(prompt.layout.range_of_part(value.part) == 1 for value in halves[1])


def test_each_block_counts_once_and_leads_once_in_every_list():
    prompt = prompt_of(layer_ranges=2, kv_shards=2)
    first, second = (all_of(prompt, number) for number in range(2))
    assert [v.counts for v in first] == [v.leads for v in first] == [True, False] * 4
    assert [v.leads for v in second] == [True, False] * 4
    assert not any(value.counts for value in second)


def test_values_behind_a_window_are_left_out():
    tables = [range(16), [NO_BLOCK] * 8 + list(range(8))]
    prompt = prompt_of(layers=(FULL, SLIDING), tables=tables)
    assert [(v.number, v.part.group) for v in all_of(prompt)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
    ]


@pytest.mark.parametrize("layers", [(FULL,) * 4, (FULL, SLIDING)])
@pytest.mark.parametrize("layer_range", [None, 0, 1])
@pytest.mark.parametrize("first_block", [0, 2])
def test_a_chain_names_the_same_values(layers, layer_range, first_block):
    tables = [range(16), [NO_BLOCK] * 8 + list(range(8))][: len(set(layers))]
    prompt = prompt_of(layers=layers, tables=tables, layer_ranges=2)
    values = prompt.values(BlockRange(first_block, 4), layer_range)
    chain = prompt.chain(first_block, layer_range)
    assert list(chain.keys) == [value.key for value in values]
    assert list(chain.numbers) == [value.number for value in values]


@pytest.mark.parametrize(("count", "whole"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (8, 8)])
def test_whole_blocks_have_all_their_values(count, whole):
    assert whole_blocks(all_of(prompt_of(kv_shards=2)), count) == whole


@pytest.mark.parametrize("first_block", [0, 1, 3, 4])
@pytest.mark.parametrize("layer_range", [None, 0, 1])
def test_bytes_are_those_of_the_payloads(first_block, layer_range):
    prompt = prompt_of(layer_ranges=2)
    values = prompt.values(BlockRange(first_block, 4), layer_range)
    want = sum(value.size - block.HEADER_BYTES for value in values)
    assert bytes_of(prompt.layout, prompt.keys, first_block, layer_range) == want
