"""Pulse: the beats of an instance that saves hand-offs, as another instance sees them.

A store can neither replace a value nor say how old one is. So the beats go round a ring of keys:
beat n is put under key n modulo RING, and beat n - 2 is removed after it. Whoever looks sees the
last two beats, and a new one where there was none.
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
        self._newest: int | None = None
        self._heard_at = self._asked_at = clock()

    def wanted(self) -> list[BlockKey]:
        """Returns the keys to look for: those that are stored only after another beat."""
        if self._newest is None:
            return self._ring
        return [self._ring[(self._newest + ahead) % RING] for ahead in (1, 2)]

    def note(self, stored: AbstractSet[BlockKey], asked_at: float) -> bool:
        """Takes note of a look. Returns whether it found a beat, so that `wanted` is another.

        Only looks count: where D itself did not look for a while, P was not silent.
        """
        has_beat = not stored.isdisjoint(self.wanted())
        if has_beat:
            self._newest = self._newest_of([n for n in range(RING) if self._ring[n] in stored])
        if has_beat or asked_at - self._asked_at > _MOST_GAP_S:
            self._heard_at = asked_at
        self._asked_at = asked_at
        return has_beat

    def hear(self, asked_at: float) -> None:
        """Counts anything else that the instance has stored as a beat."""
        self._heard_at = max(self._heard_at, asked_at)

    def is_silent(self) -> bool:
        """Returns whether the instance had stopped beating when the last look began."""
        return self._asked_at - self._heard_at > self._silence_s

    def _newest_of(self, found: list[int]) -> int:
        """Returns the last of these beats: the one that no other follows."""
        return next((n for n in found if (n + 1) % RING not in found), found[-1])
