"""CallWatch: tells others that a thread's call of the store takes too long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pdstore.threads import Deadline


class CallWatch:
    """One thread calls the store in `calling`; any thread may ask whether that is stuck.

    patience_s: how long a call may take before it counts as stuck.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._deadline: Deadline | None = None  # while a call runs

    @property
    def is_stuck(self) -> bool:
        """True while a call takes too long: what waits behind it would wait in vain."""
        deadline = self._deadline
        return deadline is not None and deadline.is_over()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Surrounds a call of the store."""
        self._deadline = Deadline(self._patience_s)
        try:
            yield
        finally:
            self._deadline = None
