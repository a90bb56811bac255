"""Patience: time that a scheduler's step has for the first answers of its lookups."""

from __future__ import annotations

import time

from pdstore.scheduler.lookup import Lookup, Match

_STEP_S = 0.001


class Patience:
    """Waits a moment for the first answer of a new lookup.

    A near store answers in a fraction of a millisecond. A request whose answer comes just after the
    scheduler looked at it waits for the next step, which may be long.

    step_s: time for all the lookups of one step.
    """

    def __init__(self, step_s: float = _STEP_S) -> None:
        self._step_s = self._left_s = step_s

    def renew(self) -> None:
        """Begins another step."""
        self._left_s = self._step_s

    def first_answer(self, lookup: Lookup) -> Match | None:
        """Returns the match; None if there is none while the step's time lasts."""
        began = time.monotonic()
        try:
            return lookup.wait(self._left_s)
        except TimeoutError:
            return None
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
