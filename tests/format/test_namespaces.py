"""Namespaces of each kind of layout are pinned: their digests, and the fields as others see them.

Another digest is another namespace: what an older version has stored would not be found any more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdstore.format.identity import LayerSpec
from pdstore.format.layout import Layout, Pipeline
from pdstore.settings import read_settings

VECTORS = Path(__file__).parent / "vectors"
PINNED = {
    **json.loads((VECTORS / "namespaces.json").read_text()),
    **json.loads((VECTORS / "namespaces_with_states.json").read_text()),
    **json.loads((VECTORS / "namespaces_with_pages.json").read_text()),
    **json.loads((VECTORS / "namespaces_with_scales.json").read_text()),
}
FULL = LayerSpec(8, 128)
OTHER_VALUES = LayerSpec(8, 192, value_dim=128)
SLIDING = LayerSpec(4, 64, window=1024, table=1)
MLA = LayerSpec.latent(576)
CONV, SSM = (LayerSpec.state(4100, form, table=2) for form in ("conv, bfloat16", "ssm, float32"))
PAGE = LayerSpec.page(64 * 132, 64, "rows of fp8, scales of float32")
SCALED, SCALED_MLA = (replace(spec, scales="float32") for spec in (FULL, MLA))
DRAFT = replace(FULL, optional=True)
ROPE = '{"rope_theta": 10000.0}'

LAYOUTS = {
    "full": {"layers": [FULL] * 32},
    "full with K and V of other sizes": {"layers": [OTHER_VALUES] * 4},
    "full in shards": {"layers": [FULL] * 4, "tp_size": 2, "tp_rank": 1},
    "full in stages": {"layers": [FULL] * 40, "pipeline": Pipeline((0,) * 20 + (1,) * 20, 1)},
    "mla": {"layers": [MLA] * 61, "rope": ROPE, "quantization": '["fp8", "auto"]'},
    "mla on several ranks": {"layers": [MLA] * 27, "tp_size": 8, "tp_rank": 3},
    "windows": {"layers": [FULL, SLIDING] * 3, "boundary_tokens": 16},
    "windows only": {"layers": [LayerSpec(4, 64, window=4096)] * 8},
    "drafts": {"layers": [FULL] * 4 + [DRAFT], "draft": "a revision"},
    "drafts with MLA": {"layers": [FULL, FULL, replace(MLA, optional=True)]},
    "drafts of MLA": {"layers": [MLA] * 4 + [DRAFT], "tp_size": 2, "tp_rank": 1},
    "images": {"layers": [FULL] * 2, "items": "name, sha256"},
    "pages of a CPU": {"layers": [FULL] * 2, "page": "vllm-cpu:amx"},
    "pages of a CPU, in shards": {"layers": [FULL] * 2, "page": "vllm-cpu:vec", "tp_size": 4},
    "pages of a CPU, with windows": {
        "layers": [FULL, SLIDING],
        "page": "vllm-cpu:vec16",
        "boundary_tokens": 16,
    },
    "host pages": {"layers": [FULL] * 28, "page": "sglang:page_first"},
    "host pages of MLA": {"layers": [MLA] * 61, "page": "sglang:layer_first"},
    "states": {"layers": [CONV, SSM, FULL] * 2, "boundary_tokens": 128},
    "states of which only the last is kept": {"layers": [FULL, CONV]},
    "states beside windows": {"layers": [CONV, FULL, SLIDING], "boundary_tokens": 16},
    "states beside MLA": {"layers": [MLA, CONV] * 2, "boundary_tokens": 128},
    "replicated states": {
        "layers": [FULL, LayerSpec.state(4100, "f", table=1, is_whole=True)],
        "tp_size": 2,
    },
    "states in shards": {
        "layers": [FULL, LayerSpec.state(4100, "f", ranks=2, table=1)],
        "tp_size": 2,
        "tp_rank": 1,
    },
    "states beside pages of a CPU": {
        "layers": [FULL, CONV],
        "page": "vllm-cpu:vec16",
        "boundary_tokens": 16,
    },
    "pages beside MLA": {"layers": [PAGE, MLA] * 4, "engine_block_tokens": 64},
    "pages in fp8": {
        "layers": [PAGE, LayerSpec.latent(656)] * 4,
        "dtype": "uint8",
        "quantization": '["fp8", "fp8_ds_mla"]',
        "engine_block_tokens": 64,
    },
    "pages beside states": {"layers": [PAGE, MLA, CONV], "engine_block_tokens": (64, 64, None)},
    "scales apart": {
        "layers": [SCALED] * 4,
        "dtype": "int8",
        "quantization": "int8, a scale for each token and head",
    },
    "scales apart in shards": {"layers": [SCALED] * 4, "dtype": "int8", "tp_size": 2, "tp_rank": 1},
    "scales apart beside layers without": {"layers": [SCALED, SCALED_MLA, FULL], "dtype": "int8"},
}
SETTINGS = {
    "a salt": {"salt": "secret"},
    "a salt with white space": {"salt": " secret\n"},
    "a seal": {"seal_key_file": "/run/keys/seal"},
    "layer ranges": {"layer_ranges": 2},
    "shards": {"kv_shards": 4},
    "block tokens": {"block_tokens": 256},
}


def pinned_of(layout: dict, given: dict) -> dict:
    settings = read_settings(**{"block_tokens": 64, **given})
    common = {"dtype": "bfloat16", "engine_block_tokens": 16, "rope": ""}
    made = Layout.of(settings, **{**common, **layout}).namespace(settings, weights="sha256:00")
    return {
        "hex": made.hex,
        "described": dict(made.described),
        "parts": [list(part) for part in made.parts],
        "block_tokens": made.block_tokens,
        "num_shards": made.num_shards,
        "windows": {str(group): tokens for group, tokens in made.needs.items()},
        **({"states": sorted(made.states)} if made.states else {}),
        **({"drafts": {str(n): name for n, name in made.drafts.items()}} if made.drafts else {}),
    }


CASES = {
    **{name: (layout, {}) for name, layout in LAYOUTS.items()},
    **{name: ({"layers": [FULL] * 5}, given) for name, given in SETTINGS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_a_namespace_is_what_it_always_was(name):
    assert pinned_of(*CASES[name]) == PINNED[name]


def test_stages_and_ranks_that_each_hold_all_of_mla_are_no_part_of_a_namespace():
    assert pinned_of({"layers": [FULL] * 40}, {})["hex"] == PINNED["full in stages"]["hex"]
    assert pinned_of({"layers": [MLA] * 27}, {})["hex"] == PINNED["mla on several ranks"]["hex"]


def test_a_layout_without_states_pages_or_scales_has_no_field_for_them():
    for name, (layout, _) in CASES.items():
        for field in ("form", "scales"):
            is_needed = any(getattr(spec, field) is not None for spec in layout["layers"])
            assert (field in PINNED[name]["described"]) == is_needed


@pytest.mark.parametrize(
    "other",
    [
        LayerSpec.state(4100, "conv, float16", table=2),
        LayerSpec.state(4104, "conv, bfloat16", table=2),
        LayerSpec(1, 4100, value_dim=0, table=2, is_whole=True),
    ],
    ids=["another form", "another size", "no state"],
)
def test_what_a_states_bytes_are_is_part_of_the_namespace(other):
    one, two = (pinned_of({"layers": [FULL, spec]}, {})["hex"] for spec in (CONV, other))
    assert one != two


@pytest.mark.parametrize(
    "other",
    [
        LayerSpec.page(64 * 132, 64, "rows of fp8, scales of bfloat16"),
        LayerSpec.page(64 * 132, 32, "rows of fp8, scales of float32"),
        LayerSpec.page(64 * 136, 64, "rows of fp8, scales of float32"),
        LayerSpec.latent(64 * 132),
    ],
    ids=["another form", "other tokens", "another size", "no page"],
)
def test_what_a_pages_bytes_are_is_part_of_the_namespace(other):
    layouts = (
        {"layers": [MLA, replace(spec, table=1)], "engine_block_tokens": (64, spec.cell_tokens)}
        for spec in (PAGE, other)
    )
    one, two = (pinned_of(layout, {})["hex"] for layout in layouts)
    assert one != two


def test_a_speculating_instance_has_the_namespace_of_one_that_does_not_speculate():
    for name in ("drafts", "drafts with MLA", "drafts of MLA"):
        layout = {**LAYOUTS[name], "draft": ""}
        layout["layers"] = [spec for spec in layout["layers"] if not spec.optional]
        assert PINNED[name]["drafts"].keys() == {"1"}
        assert {**pinned_of(layout, {}), "drafts": PINNED[name]["drafts"]} == PINNED[name]


def test_a_block_table_of_drafts_alone_is_not_counted():
    layers = [replace(FULL, table=2), replace(SLIDING, table=0)]
    drafting = [*layers, replace(DRAFT, table=1)]
    plain = [replace(FULL, table=1), replace(SLIDING, table=0)]
    assert pinned_of({"layers": drafting}, {})["hex"] == pinned_of({"layers": plain}, {})["hex"]


@pytest.mark.parametrize(
    "change",
    [
        {"draft": "another revision"},
        {"layers": [FULL] * 4 + [DRAFT] * 2},
        {"layers": [FULL] * 4 + [replace(DRAFT, window=1024)]},
        {"layers": [FULL] * 4 + [replace(DRAFT, head_dim=64)]},
        {"layers": [FULL] * 4 + [replace(DRAFT, scales="float32")]},
        {"layers": [FULL] * 4 + [replace(PAGE, optional=True)], "engine_block_tokens": 64},
    ],
    ids=["revision", "layers", "window", "row", "scales", "pages"],
)
def test_what_a_draft_is_names_its_groups_alone(change):
    one, other = (pinned_of({**LAYOUTS["drafts"], **more}, {}) for more in ({}, change))
    assert one["drafts"] != other["drafts"]
    assert one["hex"] == other["hex"]


def test_drafts_that_engines_deal_out_otherwise_to_block_tables_have_other_keys():
    """The second group is the third of three equal layers here, and the second one there."""
    one, other = (
        pinned_of({"layers": [FULL, *(replace(DRAFT, table=n) for n in tables)]}, {})
        for tables in ([0, 0, 1], [0, 1, 2])
    )
    assert one["hex"] == other["hex"]
    assert one["drafts"].keys() == {"1", "2"}
    assert not one["drafts"].items() & other["drafts"].items()


def test_no_two_pinned_namespaces_are_one():
    assert CASES.keys() == PINNED.keys()
    assert len({each["hex"] for each in PINNED.values()}) == len(PINNED)
