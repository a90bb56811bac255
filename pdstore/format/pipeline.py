"""Pipeline: which of a model's layers each stage of pipeline-parallel ranks holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdstore.errors import LayoutError
from pdstore.format.layer_groups import groups_of
from pdstore.format.layer_spec import LayerSpec
from pdstore.settings import MAX_LAYER_RANGES


@dataclass(frozen=True)
class Pipeline:
    """The stages of an instance's layers, and the stage of this rank.

    It is no part of the namespace, so P and D may have different stages. Therefore no value may
    hold layers of two stages: every KV group must lie within one.

    stage_of: the stage of each layer, in the layout's order.
    stage: this rank's, counted from 0.
    """

    stage_of: tuple[int, ...]
    stage: int

    @property
    def num_stages(self) -> int:
        return 1 + max(self.stage_of)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of this stage's layers, in order."""
        return tuple(n for n, stage in enumerate(self.stage_of) if stage == self.stage)

    def check(self, layers: Sequence[LayerSpec], num_ranges: int) -> None:
        """Raises LayoutError if the stages do not fit a model's layers in so many layer ranges."""
        if len(self.stage_of) != len(layers) or set(self.stage_of) != set(range(self.num_stages)):
            raise LayoutError("each layer has a stage, and each stage of a pipeline has layers")
        if not 0 <= self.stage < self.num_stages:
            raise LayoutError(f"there is no stage {self.stage} of {self.num_stages}")
        if self._splits(layers, num_ranges):
            return
        counts = ", ".join(str(self.stage_of.count(n)) for n in range(self.num_stages))
        fitting = [n for n in _candidates(layers) if self._splits(layers, n)]
        raise LayoutError(
            f"pipeline stages of {counts} layers do not end where the model's {num_ranges} layer"
            " ranges end, in which blocks are stored: "
            + (
                f"set PDSTORE_LAYER_RANGES={fitting[0]} on P and on D"
                if fitting
                else f"no PDSTORE_LAYER_RANGES up to {MAX_LAYER_RANGES} fits them"
            )
        )

    def _splits(self, layers: Sequence[LayerSpec], num_ranges: int) -> bool:
        """True if no KV group lies in two stages."""
        return all(
            len({self.stage_of[layer] for layer in group}) == 1
            for group in groups_of(layers, num_ranges)
        )


def _candidates(layers: Sequence[LayerSpec]) -> Iterable[int]:
    return range(1, min(MAX_LAYER_RANGES, len(layers)) + 1)
