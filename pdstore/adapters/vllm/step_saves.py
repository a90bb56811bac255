"""StepSaves: the saves of one step, released layer by layer while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.worker.open_save import OpenSave


class StepSaves:
    """The open saves of the current step. vLLM's worker thread calls it.

    A save reads a layer after the work that was queued on the current stream when the layer was
    reported. Layers that are not reported during the step are released by `finish`.

    num_layers: layers of the layout.
    layers: names of the first of them, in order, which may be released during the step.
    """

    def __init__(self, num_layers: int, layers: Sequence[str] = ()) -> None:
        self._num_layers = num_layers
        self._positions = {name: position for position, name in enumerate(layers)}
        self._open: list[OpenSave] = []
        self._computed: set[int] = set()
        self._num_computed = 0  # leading layers, without a gap

    def add(self, save: OpenSave) -> None:
        """Adds a save of this step, before any layer of the step is reported."""
        self._open.append(save)

    def layer_done(self, name: str) -> None:
        """Releases a layer whose work is queued, once all layers before it are released."""
        position = self._positions.get(name)
        if position is None:
            return
        self._computed.add(position)
        if position != self._num_computed:
            return
        while self._num_computed in self._computed:
            self._num_computed += 1
        for save in self._open:
            save.layers_done(self._num_computed)

    def finish(self) -> None:
        """Releases all layers and ends the step. Cancels the saves that cannot be released."""
        saves = self._end()
        try:
            while saves:
                saves[-1].layers_done(self._num_layers)
                saves.pop()
        finally:
            for save in saves:
                save.job.cancel()

    def cancel(self) -> None:
        """Ends the step and cancels its saves."""
        for save in self._end():
            save.job.cancel()

    def _end(self) -> list[OpenSave]:
        saves, self._open = self._open, []
        self._computed.clear()
        self._num_computed = 0
        return saves
