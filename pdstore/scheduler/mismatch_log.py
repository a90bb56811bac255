"""MismatchLog: warnings about standing mismatches, however often clients provoke them."""

from __future__ import annotations

import logging
from collections import OrderedDict

from pdstore.threads import Deadline

log = logging.getLogger(__name__)

_MOST_MESSAGES = 64


class MismatchLog:
    """Logs a message once in `silence_s` seconds, and any message at most every `pause_s`."""

    def __init__(self, silence_s: float = 600.0, pause_s: float = 1.0) -> None:
        self._silence_s, self._pause_s = silence_s, pause_s
        self._said: OrderedDict[str, Deadline] = OrderedDict()
        self._next = Deadline(0.0)

    def warn(self, message: str, about: str | None = None) -> None:
        """Logs a message; of all that are `about` one thing only the first."""
        last = self._said.get(about or message)
        if (last is not None and not last.is_over()) or not self._next.is_over():
            return
        self._next = Deadline(self._pause_s)
        self._said[about or message] = Deadline(self._silence_s)
        while len(self._said) > _MOST_MESSAGES:
            self._said.popitem(last=False)
        log.warning(message)
