"""MarkWork: stores markers of a hand-off."""

from __future__ import annotations

from collections.abc import Mapping

from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.worker.child_job import ChildJob
from pdstore.worker.movers import Mover
from pdstore.worker.work import Shortfall, Work


class MarkWork(Work):
    """Stores markers, and nothing else."""

    def __init__(self, mover: Mover, markers: Mapping[BlockKey, block.Header]) -> None:
        self._mover, self._markers = mover, markers

    def finish(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        reason = self._mover.mark(child, self._markers)
        return None if reason is None else Shortfall(reason)
