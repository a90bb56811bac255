"""shaping: what changes KV changes the text, and nothing else does."""

from __future__ import annotations

import json

import pytest

from pdstore.adapters.shaping import SHAPING, canonical, shaping

PLAIN = dict.fromkeys(SHAPING)


@pytest.mark.parametrize("field", SHAPING)
def test_every_field_counts(field):
    other = {**PLAIN, field: {"rope_type": "yarn"} if field.startswith("rope") else 7}
    assert shaping(other, max_model_len=1) != shaping(PLAIN, max_model_len=1)


def test_the_longest_prompt_counts_for_longrope_alone():
    long = {**PLAIN, "rope_scaling": {"type": "longrope"}}
    assert shaping(long, max_model_len=1) != shaping(long, max_model_len=2)
    assert shaping(PLAIN, max_model_len=1) == shaping(PLAIN, max_model_len=2)


def test_what_else_an_engine_names_counts():
    assert json.loads(shaping(PLAIN, max_model_len=1, layers=["a"]))["layers"] == ["a"]


def test_the_order_of_keys_does_not_count():
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
