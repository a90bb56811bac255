"""Heartbeat and Markers: tell D, beside the blocks, that P lives, has begun, or will not go on."""

# Decision: docs/decisions/013-heartbeat.md
from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdstore.errors import ReadOnly, StoreError
from pdstore.format import block
from pdstore.format.handoff import PERIOD_S, RING, HandoffId, beat_key
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.format.namespace import Namespace
from pdstore.outcome import Direction
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.threads import Deadline, Ticker, call_or
from pdstore.worker.job import ChildJob, Job, Shortfall, Urgency, Work
from pdstore.worker.job_queue import JobQueue
from pdstore.worker.movers import Mover

_SLOT_BYTES = 4096


class Beats:
    """The beats that an instance has put round their ring, and the next one. For one thread.

    instance: its id, 32 hex digits.
    """

    def __init__(self, store: Store, namespace: Namespace, instance: str) -> None:
        self._store = store
        self._namespace = namespace
        self._instance = instance
        self._number = 0  # of the next beat

    def put_next(self) -> None:
        """Puts a beat, and removes all before it but the last one.

        A beat that the store does not take is left out: the save in progress reports the error.
        """
        number, self._number = self._number, (self._number + 1) % RING
        slots = Slots(self._store.allocate(_SLOT_BYTES), _SLOT_BYTES, [0], [block.HEADER_BYTES])
        id = bytes.fromhex(self._instance)
        header = block.Header(block.FLAG_MARKER, 0, 0, 1, 0, 0, self._namespace.digest, id)
        block.seal(slots.value(0), header)
        with contextlib.suppress(StoreError):
            self._store.put([self._key(number)], slots)
            self._store.remove([self._key(number - 2), self._key(number - 3)])

    def _key(self, number: int) -> BlockKey:
        return beat_key(self._namespace, self._instance, number)


class Heartbeat:
    """Puts one small value each `period_s`, as long as a hand-off is being saved.

    The first one comes up to a period after a hand-off's begin: most are saved by then. One rank,
    with the first layer's first shard, beats for its instance, and until the other ranks' saves
    must have ended too. Any thread may call.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        namespace: Namespace,
        store: Store,
        period_s: float = PERIOD_S,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._period_s = period_s
        is_first = 0 in layout.owned_shards and 0 in layout.held_layers
        self._is_mine = settings.publish and is_first
        is_alone = len(layout.owned_shards) == layout.grid_shards and layout.num_stages == 1
        self._linger_s = 0.0 if is_alone else settings.deadline_s
        self._ends: dict[HandoffId, Deadline | None] = {}  # None: it is being saved
        self._beats: dict[str, Beats] = {}
        self._due_at: float | None = None
        self._thread = Ticker("pdstore-heartbeat", self._turn)  # the last: it uses all of these

    def begin_beats(self, handoff: HandoffId) -> None:
        """Beats for a hand-off, from now on."""
        if self._is_mine and handoff.instance is not None:
            self._ends[handoff] = None
            if self._due_at is None:  # else a turn comes anyway
                self._thread.wake()

    def end_beats(self, handoff: HandoffId) -> None:
        """Ends the beats for a hand-off. Does nothing for one that has ended or never began."""
        if handoff in self._ends:
            self._ends[handoff] = Deadline(self._linger_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread."""
        self._thread.stop(timeout_s)

    def _turn(self) -> float | None:
        for handoff, end in self._ends.copy().items():
            if end is not None and end.is_over():
                self._ends.pop(handoff, None)
        due_at, self._due_at = self._due_at, None  # a `begin_beats` after this wakes
        if not self._ends:
            return None
        now = time.monotonic()
        self._due_at = due_at if due_at is not None and now < due_at else now + self._period_s
        if due_at is not None and now >= due_at:
            for instance in {handoff.instance for handoff in self._ends.copy()}:
                if instance is not None:
                    call_or(self._beats_of(instance).put_next, None)
        return max(0.0, self._due_at - time.monotonic())

    def _beats_of(self, instance: str) -> Beats:
        if instance not in self._beats:
            self._beats[instance] = Beats(self._store, self._namespace, instance)
        return self._beats[instance]


@dataclass(eq=False)
class MarkWork(Work):
    """Stores markers of a hand-off, and nothing else."""

    mover: Mover
    markers: Mapping[BlockKey, block.Header]

    def conclude(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        reason = self.mover.mark(child, self.markers)
        return None if reason is None else Shortfall(reason)


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
        self._settings = settings
        self._namespace = namespace
        self._num_shards = layout.grid_shards
        self._mover = mover
        self._queue = queue

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

    def _started(self, handoff: HandoffId, num_tokens: int) -> tuple[BlockKey, block.Header]:
        marker = handoff.started_marker(self._namespace, self._num_shards, num_tokens)
        return handoff.started(self._namespace), marker

    def _put(self, key: BlockKey, marker: block.Header) -> Job:
        work, seconds = MarkWork(self._mover, {key: marker}), self._settings.deadline_s
        job = Job(Direction.SAVE, work, seconds=seconds, urgency=Urgency.MARKER)
        if not self._settings.publish:
            return self._queue.reject(job, ReadOnly("PDSTORE_PUBLISH=0"))
        return self._queue.submit(job)
