"""Heartbeat: tells D that this instance lives, while it saves what D waits for."""

from __future__ import annotations

import time

from pdstore.format.handoff import PERIOD_S, HandoffId
from pdstore.format.layout import Layout
from pdstore.format.namespace import Namespace
from pdstore.settings import Settings
from pdstore.store.base import Store
from pdstore.threads import Deadline, Ticker, call_or
from pdstore.worker.beats import Beats


class Heartbeat:
    """Puts one small value each `period_s`, as long as a hand-off is being saved.

    The first one comes up to a period after a hand-off's begin: most are saved by then. One rank,
    with the first layer's first shard, beats for its instance, and until the other ranks' saves
    must have ended too. Any thread may call, and a signal handler too.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        namespace: Namespace,
        store: Store,
        period_s: float = PERIOD_S,
    ) -> None:
        self._store, self._namespace, self._period_s = store, namespace, period_s
        is_first = 0 in layout.owned_shards and 0 in layout.held_layers
        self._is_mine = settings.publish and is_first
        is_alone = len(layout.owned_shards) == layout.grid_shards and layout.num_stages == 1
        self._linger_s = 0.0 if is_alone else settings.deadline_s
        self._ends: dict[HandoffId, Deadline | None] = {}  # None: it is being saved
        self._beats: dict[str, Beats] = {}
        self._due_at: float | None = None
        self._thread = Ticker("pdstore-heartbeat", self._turn)  # the last: it uses all of these

    def begin(self, handoff: HandoffId) -> None:
        """Beats for a hand-off, from now on."""
        if self._is_mine and handoff.instance is not None:
            self._ends[handoff] = None
            if self._due_at is None:  # else a turn comes anyway
                self._thread.wake()

    def end(self, handoff: HandoffId) -> None:
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
        due_at, self._due_at = self._due_at, None  # a `begin` after this wakes
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
