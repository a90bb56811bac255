"""Layouts: groups, shards, stages, sizes, what is refused, and what makes another namespace."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from pdstore.errors import LayoutError
from pdstore.format.identity import LayerSpec, groups_of, range_of
from pdstore.format.keys import Part
from pdstore.format.layout import Layout, Pipeline
from pdstore.settings import read_settings
from tests.support.kv import flat_layout

SETTINGS = read_settings(block_tokens=64)
FULL = LayerSpec(8, 128)
SLIDING = LayerSpec(4, 64, window=1024)
MLA = LayerSpec.latent(576)
STATE = LayerSpec.state(4100, "f", ranks=2, table=1)
PAGE = LayerSpec.page(64 * 132, 64, "rows, scales")


def layout(**changes) -> Layout:
    return flat_layout(
        **{
            "dtype": "bfloat16",
            "layers": (FULL, SLIDING, FULL),
            "block_tokens": 64,
            "engine_block_tokens": 16,
            "rope": "",
            **changes,
        }
    )


def test_equal_layers_of_a_range_are_a_group_and_ranges_come_in_order():
    assert groups_of((FULL, SLIDING, FULL), 1) == ((0, 2), (1,))
    assert groups_of((FULL, SLIDING) * 3, 2) == ((0, 2), (1,), (3, 5), (4,))
    assert groups_of((FULL,) * 5, 3) == ((0, 1), (2, 3), (4,))


@pytest.mark.misconfiguration("`PDSTORE_KV_SHARDS` that does not divide the KV heads")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"dtype": "float31"}, "float31"),
        ({"engine_block_tokens": 48}, "PDSTORE_BLOCK_TOKENS"),
        ({"num_shards": 3, "tp_size": 2}, "PDSTORE_KV_SHARDS"),
        (
            {"num_shards": 3},
            "8 KV heads do not split into 3 shards: PDSTORE_KV_SHARDS and the TP size must",
        ),
        ({"tp_rank": 1}, "rank 1"),
        (
            {"layers": (FULL, STATE), "num_shards": 4, "tp_size": 4},
            "states of 2 ranks do not split into 4 shards, .*: give P and D the same TP size, and",
        ),
        (
            {"layers": (FULL, STATE), "num_shards": 2},
            "one of 1 ranks holds several of 2 parts of a state, .*: do not set PDSTORE_KV_SHARDS",
        ),
        (
            {"layers": (FULL, dataclasses.replace(STATE, table=0)), "num_shards": 2, "tp_size": 2},
            "either states or the KV of tokens: give the layers with states a table of their own",
        ),
        (
            {
                "layers": (FULL, STATE),
                "num_shards": 2,
                "tp_size": 2,
                "engine_block_tokens": (16, 16),
            },
            r"\[16, 16\] tokens: give None for each of the block tables \[1\]",
        ),
        (
            {"layers": (MLA, PAGE), "block_tokens": 128, "engine_block_tokens": 128},
            "engine blocks of 128 tokens, and pages of 64: a page is stored whole",
        ),
        (
            {"layers": (MLA, PAGE), "engine_block_tokens": 16},
            "engine blocks of 16 tokens, and pages of 64",
        ),
        (
            {"layers": (MLA, PAGE), "block_tokens": 32, "engine_block_tokens": 64},
            "PDSTORE_BLOCK_TOKENS=32 must be a multiple of the engine's block of 64 tokens",
        ),
        (
            {"layers": (MLA, dataclasses.replace(PAGE, table=1)), "engine_block_tokens": (64, 16)},
            "engine blocks of 16 tokens, and pages of 64",
        ),
        (
            {
                "layers": (dataclasses.replace(FULL, scales="float32"),),
                "page": "packed",
                "block_tokens": 16,
            },
            "packs its blocks as pages keeps all of a page in one tensor",
        ),
        ({"num_ranges": 4}, "3 layers do not make 4 ranges"),
        ({"pipeline": Pipeline((0, 0, 1), 0)}, "PDSTORE_LAYER_RANGES=2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, word):
    with pytest.raises(LayoutError, match=word):
        layout(**changes)


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 7])
def test_a_range_is_whole_with_its_last_layer_and_not_before(num_ranges):
    many = layout(layers=(FULL,) * 7, num_ranges=num_ranges)
    for done in range(8):
        ranges = [many.identity.range_of(n) for n in range(7)]
        whole = {*ranges} - {*ranges[done:]}
        assert many.num_whole_ranges(done) == len(whole)


@pytest.mark.parametrize(("num_layers", "num_ranges"), [(1, 1), (8, 1), (16, 2), (32, 4), (80, 4)])
def test_the_number_of_ranges_follows_from_the_size_of_a_block(num_layers, num_ranges):
    spec = LayerSpec(8, 64)  # 128 KiB of KV for a block of 64 tokens
    made = Layout.of(
        SETTINGS, dtype="bfloat16", layers=[spec] * num_layers, engine_block_tokens=16, rope=""
    )
    assert made.identity.num_ranges == num_ranges


@pytest.mark.parametrize(
    ("boundary_tokens", "size"), [(None, 64), (16, 16), (128, 128)], ids=["none", "16", "128"]
)
def test_a_stored_block_is_as_long_as_the_engine_keeps_states_apart(boundary_tokens, size):
    """A prompt's last state, the only one that some engines keep, asks for no length of blocks."""
    made = Layout.of(
        SETTINGS,
        dtype="bfloat16",
        layers=[LayerSpec.state(4100, "f"), LayerSpec(8, 128, table=1)],
        engine_block_tokens=16,
        rope="",
        boundary_tokens=boundary_tokens,
    )
    assert made.block_tokens == size
    assert made.geometry.tables == (None, 16)


@pytest.mark.parametrize(("tokens", "fits"), [(24, False), (32, True)])
def test_states_are_kept_where_engine_blocks_end(tokens, fits):
    given = {"dtype": "bfloat16", "layers": [FULL, LayerSpec.state(4100, "f", table=1)], "rope": ""}
    sizes = {"engine_block_tokens": 16, "boundary_tokens": tokens}
    if fits:
        assert Layout.of(SETTINGS, **given, **sizes).block_tokens == tokens
    else:
        with pytest.raises(
            LayoutError, match=r"\[16\] tokens do not make up the 24 tokens between"
        ):
            Layout.of(SETTINGS, **given, **sizes)


def test_a_state_makes_no_more_layer_ranges():
    """It is stored once for many blocks, which are what P stores while it computes."""
    layers = [LayerSpec(8, 64), LayerSpec.state(100 << 20, "f", table=1)] * 4
    made = Layout.of(
        SETTINGS, dtype="bfloat16", layers=layers, engine_block_tokens=16, rope=""
    ).identity
    assert made.num_ranges == 1
    assert made.block_bytes == 4 * 64 * 8 * 128 * 2


def test_a_page_has_tokens():
    with pytest.raises(LayoutError, match="a page of 0 tokens: give the tokens of an engine block"):
        LayerSpec.page(132, 0, "row, scale")


@pytest.mark.parametrize(
    ("spec", "scales", "word"),
    [
        (FULL, "fp8", "scales of 'fp8': this is no torch dtype"),
        (FULL, "nn", "scales of 'nn': this is no torch dtype"),
        (PAGE, "float32", "with its scales inside: leave `scales` out"),
        (STATE, "float32", "with its scales inside: leave `scales` out"),
    ],
)
def test_scales_are_numbers_that_belong_to_tokens(spec, scales, word):
    with pytest.raises(LayoutError, match=word):
        dataclasses.replace(spec, scales=scales)


def test_scales_count_in_bytes_where_layer_ranges_are_chosen():
    full, mla = (dataclasses.replace(spec, scales="float32") for spec in (FULL, MLA))
    made = layout(dtype="int8", layers=(full, mla)).identity
    assert made.block_bytes == 64 * (8 * (256 + 2 * 4) + 576 + 4)


def test_pages_count_in_bytes_where_layer_ranges_are_chosen():
    layers = [MLA, PAGE] * 4
    made = Layout.of(
        SETTINGS, dtype="bfloat16", layers=layers, engine_block_tokens=64, rope=""
    ).identity
    assert made.block_bytes == 4 * 64 * (576 * 2 + 132)


@pytest.mark.parametrize(
    ("layers", "page", "has_pages"),
    [
        ((MLA,), None, False),
        ((dataclasses.replace(MLA, scales="float32"),), None, False),
        ((MLA, PAGE), None, True),
        ((MLA,), "packed", True),
    ],
)
def test_a_salt_is_refused_where_a_tail_carries_its_whole_page(layers, page, has_pages):
    """Behind the tail lies what an earlier request has left, of another tenant perhaps."""
    given = {"dtype": "bfloat16", "engine_block_tokens": 64, "rope": ""}
    made = Layout.of(SETTINGS, **given, layers=layers, page=page)
    assert made.namespace(SETTINGS, weights="w").has_pages is has_pages
    salted = read_settings(block_tokens=64, salt="s")
    if has_pages:
        with pytest.raises(LayoutError, match="PDSTORE_SALT keeps tenants apart"):
            Layout.of(salted, **given, layers=layers, page=page)
    else:
        Layout.of(salted, **given, layers=layers, page=page)


@pytest.mark.parametrize("speculation", [0, 2])
def test_a_salt_is_refused_where_a_state_has_rows_for_drafts(speculation):
    """Before a draft fills them, they have what an earlier request has left."""
    layers = (MLA, LayerSpec.state(4100, "conv", table=1))
    given = {"dtype": "bfloat16", "engine_block_tokens": (64, None), "rope": "", "layers": layers}
    made = Layout.of(SETTINGS, **given, speculation=speculation)
    namespace = made.namespace(SETTINGS, weights="w")
    assert namespace.has_pages is (speculation > 0)
    assert namespace.fields.get("speculation", 0) == speculation
    salted = read_settings(block_tokens=64, salt="s")
    refusal = pytest.raises(LayoutError, match="PDSTORE_SALT keeps tenants apart")
    with refusal if speculation else contextlib.nullcontext():
        Layout.of(salted, **given, speculation=speculation)


@pytest.mark.requirement("C3", "tails expire early, and have the bytes of their tokens only")
def test_payload_bytes_are_layers_tokens_heads_channels():
    assert layout().payload_bytes(Part(0, 0), 64) == 2 * 64 * 8 * 256 * 2
    assert layout().payload_bytes(Part(1, 0), 5) == 1 * 5 * 4 * 128 * 2
    assert layout(layers=(MLA,)).payload_bytes(Part(0, 0), 64) == 64 * 576 * 2


def test_ranks_own_whole_shards_and_all_of_them_together():
    ranks = [layout(num_shards=4, tp_size=2, tp_rank=r) for r in range(2)]
    owned = [part for rank in ranks for part in rank.owned_parts]
    assert sorted(owned) == sorted(ranks[0].parts)
    full = [of for part, of in ranks[1].geometry.parts.items() if part.group == 0]
    assert [of.heads for of in full] == [slice(0, 2), slice(2, 4)]


def test_each_rank_has_all_of_a_page():
    changes = {"layers": (FULL, PAGE), "engine_block_tokens": 64, "num_shards": 2, "tp_size": 2}
    ranks = [layout(**changes, tp_rank=rank) for rank in range(2)]
    assert [rank.owned_parts for rank in ranks] == [
        (Part(0, rank), Part(1, 0)) for rank in range(2)
    ]


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


def staged(*counts: int, stage: int = 0) -> Pipeline:
    return Pipeline(tuple(n for n, count in enumerate(counts) for _ in range(count)), stage)


def check(pipeline: Pipeline, layers: list[LayerSpec], num_ranges: int) -> None:
    layout(layers=tuple(layers), num_ranges=num_ranges, pipeline=pipeline)


@pytest.mark.parametrize(
    ("counts", "num_ranges", "fitting"),
    [((16, 16), 1, 2), ((16, 16), 3, 2), ((8, 8, 8, 8), 2, 4), ((7, 8, 8, 7), 4, 19)],
)
def test_stages_that_end_inside_a_range_are_refused_with_the_number_that_fits(
    counts, num_ranges, fitting
):
    layers = [FULL] * sum(counts)
    with pytest.raises(LayoutError, match=f"set PDSTORE_LAYER_RANGES={fitting} on P and on D"):
        check(staged(*counts), layers, num_ranges)
    check(staged(*counts), layers, fitting)
    starts = [sum(counts[:n]) for n in range(1, len(counts))]
    for start in starts:
        before, after = (range_of(n, len(layers), fitting) for n in (start - 1, start))
        assert before < after


NAMESPACE_CHANGES = [
    {"dtype": "float16"},
    {"quantization": "fp8"},
    {"num_ranges": 2},
    {"layers": (FULL, FULL, FULL)},
    {"layers": (FULL, dataclasses.replace(SLIDING, window=512), FULL)},
    {"layers": (FULL, SLIDING, dataclasses.replace(FULL, head_dim=64))},
    {"block_tokens": 32},
    {"rope": "theta=1e6"},
    {"num_shards": 2},
    {"layers": (FULL, SLIDING, dataclasses.replace(FULL, scales="float32"))},
    {"layers": (FULL, SLIDING, dataclasses.replace(FULL, scales="bfloat16"))},
]


@pytest.mark.requirement("R-AW-4, C15", "stored values of another version or namespace are misses")
def test_everything_that_changes_bytes_changes_the_namespace():
    namespaces = [layout(**c).namespace(SETTINGS, weights="w") for c in [{}, *NAMESPACE_CHANGES]]
    namespaces.append(layout().namespace(SETTINGS, weights="v"))
    namespaces += [
        layout().namespace(read_settings(**change), weights="w")
        for change in ({"salt": "s"}, {"salt": "t"})
    ]
    digests = {n.digest for n in namespaces}
    assert len(digests) == len(NAMESPACE_CHANGES) + 4


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


def fields_of(**settings):
    made = layout(layers=(FULL, dataclasses.replace(SLIDING, table=1)))
    return made.namespace(read_settings(block_tokens=64, **settings), weights="w").fields


def test_the_document_has_the_layers_in_order_and_the_salt_as_a_digest_only():
    fields = fields_of(salt="secret")
    assert fields["layers"] == [["full", 8, 128, 256], ["sliding", 4, 64, 128]]
    assert (fields["windows"], fields["tables"]) == ([None, 1024], [0, 1])
    assert fields_of()["salt"] is None
    assert "secret" not in str(fields)


def test_a_seal_is_in_the_document_but_not_its_key(tmp_path):
    """The key changes in a rotation; without a seal the document is as it always was."""
    sealed = fields_of(seal_key_file=tmp_path / "a")
    assert sealed == fields_of(seal_key_file=tmp_path / "b")
    assert sealed == {**fields_of(), "seal": "aes-256-gcm"}
