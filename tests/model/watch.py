"""Rules of the hand-off that a test can take away; Watch: D's looks, and the time between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdstore.format.handoff import BEAT_INTERVAL_S, BEAT_TIMEOUT_S
from pdstore.format.keys import BlockKey
from tests.model.replay import Passed, ReplayStore
from tests.support.clock import Clock

BLOCK_TIMEOUT_S = 10.0
_PAUSE_S = BEAT_INTERVAL_S / 2  # between two looks


def is_beat(key: BlockKey) -> bool:
    return key.endswith(":beat")


@dataclass(frozen=True)
class Rules:
    """The rules of the hand-off; a test takes one away.

    beats: P beats while it saves.
    listens: D gives up a P that does not beat.
    saves_states: P says `done` only if the states are stored, too.
    takes_states: D goes on only with the states of the prompt's end.
    asks_once: D's worker learns by one look whether its load is at its end.
    sees: what D makes of the markers that are there.
    """

    checks_chain: bool = True
    verifies: bool = True
    tells_failure: bool = True
    minds_time: bool = True
    beats: bool = True
    listens: bool = True
    asks_once: bool = True
    saves_states: bool = True
    takes_states: bool = True
    sees: Callable[[set[BlockKey]], set[BlockKey]] = lambda found: found


@dataclass
class Watch:
    """Looks into the store. What is asked once for a while stands for many looks.

    is_late: whether D's time is up.
    """

    store: ReplayStore
    rules: Rules

    def __post_init__(self) -> None:
        self.clock, self.is_late = Clock(), False
        self._beats: set[BlockKey] = set()

    def looks(self, keys: Sequence[BlockKey]) -> Iterator[set[BlockKey]]:
        """Moves the clock and returns what is found, look after look; D may break off."""
        looked = self.store.look(keys)
        found, before = self.rules.sees(set(looked.found)), self._beats
        self._beats = {key for key in found if is_beat(key)}
        if looked.passed is Passed.ALL and self.rules.minds_time:
            self.is_late = True
            yield self._after(2 * BLOCK_TIMEOUT_S, found)
        elif looked.passed is Passed.SILENCE and self.rules.listens:
            for _ in range(int(BEAT_TIMEOUT_S / _PAUSE_S) + 2):
                yield self._after(_PAUSE_S, found)
        elif looked.passed is Passed.A_PERIOD:
            yield self._after(_PAUSE_S, found - self._beats | before)
            yield self._after(_PAUSE_S, found)
        else:
            yield self._after(0.2 if looked.passed is Passed.A_MOMENT else 0.0, found)

    def _after(self, seconds: float, found: set[BlockKey]) -> set[BlockKey]:
        self.clock.now += seconds
        return found
