"""Namespace: equal properties are one namespace, differences are told, the salt never is."""

from __future__ import annotations

import pytest

from pdstore.format.handoff import HandoffId
from pdstore.format.keys import (
    POOL_ID_KEY,
    SHAPING,
    Namespace,
    Part,
    PromptKeys,
    prefix_of,
    shaping,
)

PARTS = (Part(0, 0), Part(0, 1), Part(1, 0))
NAMESPACE = Namespace({"format": 1, "weights": "w"}, PARTS, block_tokens=4)
PLAIN = dict.fromkeys(SHAPING)


def test_a_namespaces_keys_are_those_that_begin_with_its_prefix():
    prefix = prefix_of(NAMESPACE.hex)
    keys = PromptKeys(NAMESPACE).extend(range(100)).store_keys(NAMESPACE.parts)
    keys += [HandoffId.new().done(NAMESPACE, 3), HandoffId.new().failed(NAMESPACE)]
    assert all(key.startswith(prefix) for key in keys)
    assert not POOL_ID_KEY.startswith(prefix)


def test_differences_name_the_fields_and_never_the_salt():
    a = Namespace({"weights": "x", "dtype": "float32", "salt": "a" * 64}, PARTS, 4)
    b = Namespace({"weights": "y", "dtype": "float32", "salt": "b" * 64}, PARTS, 4)
    lines = a.differences(b.described)
    assert [line.split(":")[0] for line in lines] == ["salt", "weights"]
    assert "aaaa" not in str(a.described)
    assert a.differences(a.described) == []


@pytest.mark.parametrize(
    "bad", ["", "0" * 31, "A" * 32, "0" * 33, "../" + "0" * 29, "0" * 32 + "\n"]
)
def test_a_namespace_that_is_no_digest_has_no_prefix(bad):
    with pytest.raises(ValueError, match="32 lower-case hex digits"):
        prefix_of(bad)


def test_equal_layers_are_told_once_so_that_a_difference_can_be_read():
    a, b = (
        Namespace({"layers": [["attention", heads, 128, 256]] * 32}, PARTS, 4) for heads in (8, 4)
    )
    (line,) = a.differences(b.described)
    assert line == ('layers: 32 x ["attention",4,128,256] there, 32 x ["attention",8,128,256] here')


def test_a_property_that_is_no_json_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        Namespace({"scale": float("nan")}, PARTS, 4)


@pytest.mark.parametrize("field", SHAPING)
def test_every_field_that_shapes_the_kv_counts(field):
    other = {**PLAIN, field: {"rope_type": "yarn"} if field.startswith("rope") else 7}
    assert shaping(other, max_model_len=1) != shaping(PLAIN, max_model_len=1)


def test_the_longest_prompt_counts_for_longrope_alone():
    long = {**PLAIN, "rope_scaling": {"type": "longrope"}}
    assert shaping(long, max_model_len=1) != shaping(long, max_model_len=2)
    assert shaping(PLAIN, max_model_len=1) == shaping(PLAIN, max_model_len=2)
