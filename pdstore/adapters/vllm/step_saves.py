"""StepSaves: the saves of one step, released by layer ranges while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

from pdstore.format.layout import Layout
from pdstore.worker.save import OpenSave


class StepSaves:
    """The open saves of the current step. vLLM's worker thread calls it.

    A save reads a layer after the work that was queued on the current stream when the last layer of
    its range was reported. Layers that are not reported during the step are released by `finish`,
    and workers begin there where the layers are only queued on a device: vLLM's thread has then
    queued all that the answer needs.

    layout: of the pool; None while there is none.
    layers: names of the first layers of its cache, in order, which may be released during the step.
    ends_late: steps end late, after drafts: workers begin when the last layer is queued.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        layers: Sequence[str] = (),
        *,
        ends_late: bool = False,
    ) -> None:
        self._layers, self._num_layers = layers, 0
        self._goes_on = not ends_late
        self._ends: dict[str, int] = {}  # the last layer of each range, with the number up to it
        if layout is not None:
            self._num_layers, whole = len(layout.held_layers), layout.num_whole_ranges
            self._ends = {
                name: count
                for count, name in enumerate(layers, 1)
                if whole(count) > whole(count - 1)
            }
        self._open: list[OpenSave] = []
        self._computed: set[str] = set()

    def add(self, save: OpenSave) -> None:
        """Adds a save of this step, before any of its layers is released."""
        self._open.append(save)

    def layer_done(self, name: str) -> int:
        """Notes a layer whose work is queued.

        Returns how many leading layers `release` can take then: 0 unless this is the last layer of
        a range, and all before it have been reported.
        """
        self._computed.add(name)
        end = self._ends.get(name, 0)
        return end if self._computed.issuperset(self._layers[:end]) else 0

    def release(self, num_layers: int) -> None:
        """Releases the first layers."""
        for save in self._open:
            save.layers_done(num_layers, goes_on=self._goes_on)

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
        return saves
