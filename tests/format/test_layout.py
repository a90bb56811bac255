"""Layouts: groups, shards, sizes, and what makes another namespace."""

from __future__ import annotations

import dataclasses

import pytest

from pdstore.format.layer_spec import LayerSpec
from pdstore.format.layout import Layout
from pdstore.format.namespace import Part
from pdstore.format.pipeline import Pipeline
from pdstore.settings import read_settings

SETTINGS = read_settings(block_tokens=64)
FULL = LayerSpec(8, 128)
SLIDING = LayerSpec(4, 64, kind="sliding", window=1024)
MLA = LayerSpec(1, 576, value_dim=0, kind="mla")


def layout(**changes) -> Layout:
    return Layout(
        **{
            "dtype": "bfloat16",
            "layers": (FULL, SLIDING, FULL),
            "block_tokens": 64,
            "engine_block_tokens": 16,
            "rope": "",
            **changes,
        }
    )


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 7])
def test_a_range_is_whole_with_its_last_layer_and_not_before(num_ranges):
    many = layout(layers=(FULL,) * 7, num_ranges=num_ranges)
    for done in range(8):
        whole = {many.range_of(n) for n in range(7)} - {many.range_of(n) for n in range(done, 7)}
        assert many.num_whole_ranges(done) == len(whole)


def test_ranges_together_are_the_block_and_each_part_is_of_one():
    one, four = layout(layers=(FULL,) * 8), layout(layers=(FULL,) * 8, num_ranges=4)
    assert sum(four.payload_bytes(p, 64) for p in four.parts) == one.payload_bytes(Part(0, 0), 64)
    assert [four.range_of_part(part) for part in four.parts] == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_layers", "num_ranges"), [(1, 1), (8, 1), (16, 2), (32, 4), (80, 4)])
def test_the_number_of_ranges_follows_from_the_size_of_a_block(num_layers, num_ranges):
    spec = LayerSpec(8, 64)  # 128 KiB of KV for a block of 64 tokens
    made = Layout.of(
        SETTINGS, dtype="bfloat16", layers=[spec] * num_layers, engine_block_tokens=16, rope=""
    )
    assert made.num_ranges == num_ranges


def test_a_user_says_how_many_ranges_and_layers_bound_them():
    wanted = read_settings(layer_ranges=3)
    for num_layers, num_ranges in ((2, 2), (3, 3), (9, 3)):
        made = Layout.of(
            wanted, dtype="float16", layers=[FULL] * num_layers, engine_block_tokens=64, rope=""
        )
        assert made.num_ranges == num_ranges


def test_payload_bytes_are_layers_tokens_heads_channels():
    assert layout().payload_bytes(Part(0, 0), 64) == 2 * 64 * 8 * 256 * 2
    assert layout().payload_bytes(Part(1, 0), 5) == 1 * 5 * 4 * 128 * 2
    assert layout(layers=(MLA,)).payload_bytes(Part(0, 0), 64) == 64 * 576 * 2


def test_ranks_own_whole_shards_and_all_of_them_together():
    ranks = [layout(num_shards=4, tp_size=2, tp_rank=r) for r in range(2)]
    owned = [part for rank in ranks for part in rank.owned_parts]
    assert sorted(owned) == sorted(ranks[0].parts)
    assert [ranks[1].heads_of(p) for p in ranks[1].owned_parts if p.group == 0] == [
        range(0, 2),
        range(2, 4),
    ]


def test_an_mla_group_has_one_shard_that_every_rank_owns():
    for rank in range(2):
        two = layout(layers=(MLA, FULL), num_shards=2, tp_size=2, tp_rank=rank)
        assert Part(0, 0) in two.owned_parts
        assert two.shards_of(0) == 1


def test_a_stage_owns_the_parts_of_its_layers_and_all_ranks_together_all_of_them():
    ranks = [
        layout(
            layers=(FULL, MLA) * 2,
            num_ranges=2,
            num_shards=2,
            tp_size=2,
            tp_rank=tp_rank,
            pipeline=Pipeline((0, 0, 1, 1), stage),
        )
        for stage in range(2)
        for tp_rank in range(2)
    ]
    assert [rank.held_layers for rank in ranks] == [(0, 1)] * 2 + [(2, 3)] * 2
    assert [rank.held_ranges for rank in ranks] == [(0,)] * 2 + [(1,)] * 2
    assert {part for rank in ranks for part in rank.owned_parts} == set(ranks[0].parts)
    assert not set(ranks[0].owned_parts) & set(ranks[2].owned_parts)
    assert [list(rank.owned_shards) for rank in ranks] == [[0], [1], [0], [1]]


def test_a_stages_range_is_whole_with_the_last_of_its_own_layers():
    last = layout(layers=(FULL,) * 6, num_ranges=3, pipeline=Pipeline((0, 0, 1, 1, 1, 1), stage=1))
    assert [last.num_whole_ranges(done) for done in range(5)] == [0, 0, 1, 1, 2]


NAMESPACE_CHANGES = [
    {"dtype": "float16"},
    {"quantization": "fp8"},
    {"num_ranges": 2},
    {"layers": (FULL, FULL, FULL)},
    {"layers": (FULL, dataclasses.replace(SLIDING, window=512), FULL)},
    {"layers": (FULL, SLIDING, dataclasses.replace(FULL, head_dim=64))},
    {"block_tokens": 32},
    {"rope": "theta=1e6"},
    {"order": "head"},
    {"num_shards": 2},
    {"draft_layers": 1},
]


def test_everything_that_changes_bytes_changes_the_namespace():
    namespaces = [layout(**c).namespace(SETTINGS, weights="w") for c in [{}, *NAMESPACE_CHANGES]]
    namespaces.append(layout().namespace(SETTINGS, weights="v"))
    namespaces += [
        layout().namespace(read_settings(**change), weights="w")
        for change in ({"salt": "s"}, {"salt": "t"}, {"hash": "xxh3_128"})
    ]
    digests = {n.digest for n in namespaces}
    assert len(digests) == len(NAMESPACE_CHANGES) + 5


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_block_tokens": 32},
        {"num_shards": 2, "tp_size": 2, "tp_rank": 1},
        {"pipeline": Pipeline((0, 1, 2), stage=1)},
    ],
)
def test_what_is_of_one_instance_only_is_not_in_the_namespace(changes):
    base = layout(num_shards=changes.get("num_shards", 1), num_ranges=3)
    assert (
        layout(**changes, num_ranges=3).namespace(SETTINGS, weights="w").digest
        == base.namespace(SETTINGS, weights="w").digest
    )
