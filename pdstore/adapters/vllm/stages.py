"""The layers of a whole model, of which each pipeline stage of vLLM has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed

from pdstore.errors import LayoutError
from pdstore.format.layout import LayerSpec, Pipeline


class NamedLayer(NamedTuple):
    """A layer and vLLM's name of it."""

    name: str
    spec: LayerSpec


def all_layers(
    own: Callable[[], list[NamedLayer]], ranks: Any
) -> tuple[list[NamedLayer], Pipeline | None]:
    """Returns the model's layers in the layout's order, and their stages if there are several.

    The ranks of a pipeline call it at the same time, and tell each other what `own` returns.
    ranks: vLLM's group of them.
    Raises LayoutError on all of them if `own` does on one: else the others would wait for it.
    """
    if ranks.world_size == 1:
        return own(), None
    told: list[list[NamedLayer] | str] = [""] * ranks.world_size
    torch.distributed.all_gather_object(told, _told(own), group=ranks.cpu_group)
    return joined(told, ranks.rank_in_group)


def joined(
    told: Sequence[Sequence[NamedLayer] | str], stage: int
) -> tuple[list[NamedLayer], Pipeline]:
    """Returns the layers of all stages, in the order in which one rank would have them.

    told: the layers of each stage, by block table; or why it cannot be served.
    stage: this rank's.
    Raises LayoutError for the first stage that cannot be served.
    """
    layers: list[tuple[NamedLayer, int]] = []
    for number, each in enumerate(told):
        if isinstance(each, str):
            raise LayoutError(f"pipeline stage {number}: {each}")
        layers += [(layer, number) for layer in each]
    layers.sort(key=lambda each: each[0].spec.table)  # stable: a table's layers stay in order
    return [layer for layer, _ in layers], Pipeline(tuple(number for _, number in layers), stage)


def _told(own: Callable[[], list[NamedLayer]]) -> list[NamedLayer] | str:
    try:
        return own()
    except LayoutError as error:
        return str(error)
