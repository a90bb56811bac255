"""KV groups: equal layers of one range."""

from __future__ import annotations

from pdstore.format.layer_groups import groups_of
from pdstore.format.layer_spec import LayerSpec

FULL = LayerSpec(8, 128)
SLIDING = LayerSpec(4, 64, kind="sliding", window=1024)


def test_layers_of_one_shape_and_window_are_a_group():
    assert groups_of((FULL, SLIDING, FULL), 1) == ((0, 2), (1,))


def test_layers_of_another_range_are_another_group_and_ranges_come_in_order():
    assert groups_of((FULL, SLIDING) * 3, 2) == ((0, 2), (1,), (3, 5), (4,))
    assert groups_of((FULL,) * 5, 3) == ((0, 1), (2, 3), (4,))
