"""Pulse: the beats of an instance that saves hand-offs, as another instance sees them.

A store can neither replace a value nor say how old one is. So the beats go round a ring of keys:
beat n is put under key n modulo RING, and those before beat n - 1 are removed after it. A
look finds the last two beats, and other ones each period.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pdstore.format.keys import BlockKey
from pdstore.format.namespace import Namespace

RING = 4
PERIOD_S = 1.0
"""Seconds between two beats. A hand-off that is saved sooner costs no beat."""
SILENCE_S = 1.35
"""Seconds without a beat after which an instance counts as dead."""
_MOST_GAP_S = 0.6  # between two looks; after a longer one nothing is known of the time between
_SUFFIX = ":beat"


def beat_key(namespace: Namespace, instance: str, number: int) -> BlockKey:
    """Returns the key of an instance's beat; `instance` is its id, 32 hex digits."""
    return BlockKey(f"pds1:{namespace.hex}:handoff:{instance}:{number % RING}{_SUFFIX}")


def is_beat(key: BlockKey) -> bool:
    """Returns whether this is the key of a beat."""
    return key.endswith(_SUFFIX)


class Pulse:
    """The beats of one instance, as another one sees them that looks again and again.

    For one thread. `asked_at` is when a look began, by `clock`: what the store said is at least as
    new.
    """

    def __init__(
        self,
        namespace: Namespace,
        instance: str,
        *,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = [beat_key(namespace, instance, n) for n in range(RING)]
        self._silence_s = silence_s
        self._seen: set[BlockKey] = set()
        self._heard_at = self._asked_at = clock()

    def wanted(self) -> list[BlockKey]:
        """Returns the keys to look for."""
        return self._ring

    def note(self, stored: AbstractSet[BlockKey], asked_at: float) -> None:
        """Takes note of a look.

        Any change on the ring is a beat. What a dead instance has left there, three beats or an old
        one, does not change. Only looks count: while D itself does not look, P is not silent.
        """
        seen = {key for key in self._ring if key in stored}
        if seen != self._seen or asked_at - self._asked_at > _MOST_GAP_S:
            self._heard_at = asked_at
        self._seen, self._asked_at = seen, asked_at

    def hear(self, asked_at: float) -> None:
        """Counts anything else that the instance has stored as a beat."""
        self._heard_at = max(self._heard_at, asked_at)

    def is_silent(self) -> bool:
        """Returns whether the instance had stopped beating when the last look began."""
        return self._asked_at - self._heard_at > self._silence_s
