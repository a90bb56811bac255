"""ReasonLog: one warning for each reason of a miss or a drop, with what to look at."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdstore.errors import StoreError
from pdstore.outcome import Reason
from pdstore.telemetry.advice import ADVICE

log = logging.getLogger(__name__)

QUIET = frozenset(
    {
        Reason.ABSENT,  # ordinary for a new prompt; PrefixCacheManager tells where it is not
        Reason.NAMESPACE,  # PrefixCacheManager names the fields
        Reason.OTHER_POOL,  # PrefixCacheManager names the pools
        Reason.CANCELLED,
        Reason.CLOSED,
        Reason.READ_ONLY,
    }
)
"""Reasons that are ordinary, or that get a warning of their own elsewhere."""


class ReasonLog:
    """Warns of a reason the first time it comes up, and then at most once in `pause_s`.

    A later warning counts those that were left out. One thread at a time calls it.
    """

    def __init__(self, pause_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._next: dict[tuple[str, Reason], float] = {}
        self._left_out: dict[tuple[str, Reason], int] = {}

    def warn(self, what: str, reason: Reason, error: BaseException | None = None) -> None:
        """Says that `what` fell short, why, and what to look at.

        what: "a lookup", "a load" or "a save".
        error: the exception behind the reason, if there was one.
        """
        if reason in QUIET:
            return
        key, now = (what, reason), self._clock()
        if now < self._next.get(key, now):
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        self._next[key] = now + self._pause_s
        log.warning("%s", _text(what, reason, error, self._left_out.pop(key, 0)))


def _text(what: str, reason: Reason, error: BaseException | None, num_left_out: int) -> str:
    advice = ADVICE[reason]
    words = f"{what} fell short ({reason.value}): "
    if isinstance(error, StoreError) and error.remedy:  # its cause is known, and what to do
        words += str(error)
    else:
        words += f"{advice.means} [{error}]" if error is not None and str(error) else advice.means
        words += f". Look at {advice.look_at}"
    if num_left_out:
        words += f" ({num_left_out} more like it since the last such line)"
    return words.replace("`", "")
