"""Heartbeat: tells D that P lives."""

# Decision: docs/decisions/013-heartbeat.md
from __future__ import annotations

import contextlib
import time
from functools import partial

from pdstore.errors import StoreError
from pdstore.format import block
from pdstore.format.handoff import BEAT_INTERVAL_S, NUM_BEAT_KEYS, HandoffId, beat_key
from pdstore.format.keys import Namespace
from pdstore.format.layout import Layout
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.threads import Deadline, Ticker, call_or

_SLOT_BYTES = 4096


def put_beat(store: Store, namespace: Namespace, instance: str, number: int) -> None:
    """Puts a beat of an instance, and removes the older beats except the one right before it.

    It ignores StoreErrors: the running save reports them.
    """
    slots = Slots(store.allocate(_SLOT_BYTES), _SLOT_BYTES, [0], [block.HEADER_BYTES])
    block.seal(slots.value(0), HandoffId(instance).marker(namespace, 0, 1, 0))
    with contextlib.suppress(StoreError):
        store.put([beat_key(namespace, instance, number)], slots)
        store.remove([beat_key(namespace, instance, number - n) for n in (2, 3)])


class Heartbeat:
    """Puts one small value, a beat, every `interval_s`, as long as a hand-off is being saved.

    The first beat comes at most one interval after a hand-off has begun; many end before it. Only
    the rank that has the first shard of the first layer beats for its instance. It beats until the
    saves of the other ranks must have ended, too. Any thread may call its methods.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        namespace: Namespace,
        store: Store,
        interval_s: float = BEAT_INTERVAL_S,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._interval_s = interval_s
        is_first = 0 in layout.owned_shards and 0 in layout.held_layers
        self._is_mine = settings.publish and is_first
        is_alone = len(layout.owned_shards) == namespace.num_shards and layout.num_stages == 1
        self._others_timeout_s = 0.0 if is_alone else settings.deadline_s
        self._ends: dict[HandoffId, Deadline | None] = {}  # None while it is being saved
        self._numbers: dict[str, int] = {}  # the number of each instance's next beat
        self._thread = Ticker("pdstore-heartbeat", self._turn)  # made last, as it uses all of these

    def begin_beats(self, handoff: HandoffId) -> None:
        """Starts the beats for a hand-off."""
        if self._is_mine and handoff.instance is not None:
            self._ends[handoff] = None

    def end_beats(self, handoff: HandoffId) -> None:
        """Ends the beats for a hand-off, after the time that other ranks' saves may still take."""
        if handoff in self._ends:
            self._ends[handoff] = Deadline(self._others_timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread."""
        self._thread.stop(timeout_s)

    def _turn(self) -> float:
        began = time.monotonic()
        for handoff, end in self._ends.copy().items():
            if end is not None and end.is_over():
                self._ends.pop(handoff, None)
        for instance in {handoff.instance for handoff in self._ends.copy()}:
            if instance is not None:
                number = self._numbers.get(instance, 0)
                self._numbers[instance] = (number + 1) % NUM_BEAT_KEYS
                call_or(partial(put_beat, self._store, self._namespace, instance, number), None)
        return max(0.0, began + self._interval_s - time.monotonic())
