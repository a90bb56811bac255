"""LayerSpec: the elements of K and V together."""

from __future__ import annotations

from pdstore import LayerSpec


def test_values_are_as_wide_as_keys_unless_said_otherwise():
    assert LayerSpec(8, 128).channels == 256
    assert LayerSpec(8, 128, value_dim=64).channels == 192


def test_mla_has_no_values():
    assert LayerSpec(1, 576, value_dim=0, kind="mla").channels == 576
