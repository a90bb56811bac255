"""Markers: tells D of hand-offs that have begun, or that will not come."""

from __future__ import annotations

from pdstore.errors import ReadOnly
from pdstore.format.block import Header
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.format.namespace import Namespace
from pdstore.outcome import Direction
from pdstore.settings import Settings
from pdstore.worker.job import Job
from pdstore.worker.job_queue import JobQueue
from pdstore.worker.job_run import JobRun, Urgency
from pdstore.worker.mark_work import MarkWork
from pdstore.worker.mover import Mover


class Markers:
    """Puts the markers `started` and `failed`; a save puts its `done` itself."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        namespace: Namespace,
        mover: Mover,
        queue: JobQueue,
    ) -> None:
        self._settings, self._namespace = settings, namespace
        self._num_shards = layout.grid_shards
        self._mover, self._queue = mover, queue

    def start(self, handoff: HandoffId, num_tokens: int) -> Job:
        """Puts `started`, on a worker. num_tokens: of the whole prompt."""
        return self._put(*self._started(handoff, num_tokens))

    def start_here(self, handoff: HandoffId, num_tokens: int) -> None:
        """Puts `started` on the calling thread if the store needs no wait for that.

        A worker that wakes while an engine launches kernels takes Python's lock from that thread.
        """
        key, marker = self._started(handoff, num_tokens)
        if not (self._settings.publish and self._mover.mark_at_once(key, marker)):
            self._put(key, marker)

    def fail(self, handoff: HandoffId) -> Job:
        """Puts `failed`, on a worker."""
        marker = handoff.marker(self._namespace, 0, self._num_shards, 0)
        return self._put(handoff.failed(self._namespace), marker)

    def _started(self, handoff: HandoffId, num_tokens: int) -> tuple[BlockKey, Header]:
        marker = handoff.started_marker(self._namespace, self._num_shards, num_tokens)
        return handoff.started(self._namespace), marker

    def _put(self, key: BlockKey, marker: Header) -> Job:
        work, seconds = MarkWork(self._mover, {key: marker}), self._settings.deadline_s
        run = JobRun(Direction.SAVE, work, num_bytes=0, seconds=seconds, urgency=Urgency.MARKER)
        if not self._settings.publish:
            return self._queue.reject(run, ReadOnly("PDSTORE_PUBLISH=0"))
        return self._queue.submit(run)
