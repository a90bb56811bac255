"""Rules: those of the hand-off that a test can take away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdstore.format.keys import BlockKey


@dataclass(frozen=True)
class Rules:
    """The rules of the hand-off; a test takes one away.

    beats: P beats while it saves.
    listens: D gives up a P that does not beat.
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
    sees: Callable[[set[BlockKey]], set[BlockKey]] = lambda found: found
