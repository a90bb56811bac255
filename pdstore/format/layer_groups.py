"""The KV groups of a model's layers, which are cut into layer ranges first."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.layer_spec import LayerSpec


def range_of(layer: int, num_layers: int, num_ranges: int) -> int:
    """Returns the layer range that a layer belongs to, counted from 0.

    Ranges are runs of layers, as even as they can be.
    """
    return layer * num_ranges // num_layers


def groups_of(layers: Sequence[LayerSpec], num_ranges: int) -> tuple[tuple[int, ...], ...]:
    """Returns the layer numbers of each KV group; groups in order of their first layer.

    A group's layers are equal and of one range, and those of a range come before those of the next.
    """
    groups: dict[tuple[int, LayerSpec], list[int]] = {}
    for number, spec in enumerate(layers):
        at = range_of(number, len(layers), num_ranges)
        groups.setdefault((at, spec), []).append(number)
    return tuple(tuple(numbers) for numbers in groups.values())
