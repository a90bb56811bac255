"""Pulses: which waits are for an instance that has stopped beating."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pdstore.format.handoff import Pulse
from pdstore.format.keys import BlockKey
from pdstore.format.namespace import Namespace
from pdstore.scheduler.marker_wait import MarkerWait


class Pulses:
    """The pulses of the instances that save hand-offs, one for all the waits for an instance.

    A hand-off that does not name its instance has none. For one thread.
    """

    def __init__(
        self, namespace: Namespace, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._namespace, self._clock = namespace, clock
        self._pulses: dict[str, Pulse] = {}
        self._waits: dict[str, dict[MarkerWait, None]] = {}  # by instance, in order

    def add(self, wait: MarkerWait) -> None:
        """Takes a wait. Its instance counts as alive now: its answer has just come."""
        instance = wait.handoff.id.instance
        if instance is None:
            return
        if instance not in self._pulses:
            self._pulses[instance] = Pulse(self._namespace, instance, clock=self._clock)
        self._pulses[instance].add_beat(self._clock())
        self._waits.setdefault(instance, {})[wait] = None

    def remove(self, wait: MarkerWait) -> None:
        """Forgets a wait, if it is known."""
        instance = wait.handoff.id.instance
        waits = self._waits.get(instance or "", {})
        waits.pop(wait, None)
        if instance is not None and not waits:
            self._waits.pop(instance, None)
            self._pulses.pop(instance, None)

    def wanted(self) -> list[BlockKey]:
        """Returns the keys of beats to look for."""
        return [key for pulse in self._pulses.values() for key in pulse.ring]

    def note(self, stored: AbstractSet[BlockKey], asked_at: float) -> list[MarkerWait]:
        """Takes note of a look for `wanted`. Returns the waits whose instance has died.

        asked_at: when the look began, in seconds of the clock.
        """
        dead: list[MarkerWait] = []
        for instance, pulse in self._pulses.items():
            pulse.update(stored, asked_at)
            if pulse.is_silent():
                dead += self._waits[instance]
        return dead
