"""Layouts: groups, shards, sizes, and what makes another namespace."""

from __future__ import annotations

import dataclasses

import pytest

from pdstore.errors import LayoutError
from pdstore.format.layout import LayerSpec, Layout
from pdstore.format.namespace import Part
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


def test_layers_of_one_shape_and_window_are_a_group():
    assert layout().groups == ((0, 2), (1,))


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


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"dtype": "float31"}, "float31"),
        ({"engine_block_tokens": 48}, "PDSTORE_BLOCK_TOKENS"),
        ({"num_shards": 3, "tp_size": 2}, "PDSTORE_KV_SHARDS"),
        ({"num_shards": 16}, "do not split"),
        ({"tp_rank": 1}, "rank 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, word):
    with pytest.raises(LayoutError, match=word):
        layout(**changes)


NAMESPACE_CHANGES = [
    {"dtype": "float16"},
    {"quantization": "fp8"},
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
    [{"engine_block_tokens": 32}, {"num_shards": 2, "tp_size": 2, "tp_rank": 1}],
)
def test_what_is_of_one_instance_only_is_not_in_the_namespace(changes):
    base = layout(num_shards=changes.get("num_shards", 1))
    assert (
        layout(**changes).namespace(SETTINGS, weights="w").digest
        == base.namespace(SETTINGS, weights="w").digest
    )
