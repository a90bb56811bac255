"""Conversation: two turns through P and D, of which P finds the first in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.prompts import BLOCK_TOKENS
from examples.demo.row import Json, Row

ANSWER_TOKENS = 150


@dataclass(frozen=True)
class Conversation:
    """Both turns, and the tokens that P loaded for the second: it had not computed the answer.

    rows: one for each turn.
    known: tokens of the second turn's prompt that stood in the first turn.
    """

    rows: Sequence[Row]
    known: int
    loaded_on_p: int

    @property
    def problems(self) -> list[str]:
        """Returns a sentence for each promise that was broken."""
        found = [
            f"turn {number} of the conversation: the answer differs from that of one instance alone"
            for number, row in enumerate(self.rows, 1)
            if not row.is_same
        ]
        if self.loaded_on_p <= self.known - 1 - BLOCK_TOKENS:  # its last block is not full
            found.append(f"P loaded {self.loaded_on_p} of the {self.known} tokens of turn 1")
        return found

    @property
    def line(self) -> str:
        """Returns the line of the output."""
        return (
            f"turn 2: P loaded {self.loaded_on_p} of {self.known} tokens of turn 1, prompt and"
            f" answer; {sum(row.is_same for row in self.rows)} of {len(self.rows)} same answers"
        )

    def as_json(self) -> Json:
        """Returns its numbers."""
        turns = [row.as_json() for row in self.rows]
        return {"known": self.known, "loaded_on_p": self.loaded_on_p, "requests": turns}
