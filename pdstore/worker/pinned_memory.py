"""Pins host memory, a piece of whole slots at a time, while the process does other things."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pdstore.errors import ConfigError, SwapError
from pdstore.threads import Deadline, Worker
from pdstore.worker.swap.base import Registrar

log = logging.getLogger(__name__)

SPAN_BYTES = 16 << 20
"""Registering stalls every kernel launch of the process meanwhile: 1 ms for this much."""
_BACKGROUND_BYTES = 4 << 30
_PAUSE_S = 0.002  # between pieces in the background, so that others can launch
_POPULATORS = 4
_PAGE = 4096


class Span(NamedTuple):
    """A piece of memory that is registered in one call."""

    address: int
    num_bytes: int


def spans_of(address: int, num_bytes: int, slot_bytes: int, span_bytes: int) -> list[Span]:
    """Pieces of whole slots, about `span_bytes` each: no slot is in two of them.

    Raises ConfigError for memory or slots that are not whole pages.
    """
    if address % _PAGE or slot_bytes % _PAGE:
        raise ConfigError("only memory of whole pages can be pinned")
    step = max(1, span_bytes // slot_bytes) * slot_bytes
    return [Span(address + at, min(step, num_bytes - at)) for at in range(0, num_bytes, step)]


class PinnedMemory:
    """Memory that is being pinned: made present by four threads, registered by one.

    Starts at once. When a piece fails, the registered ones are undone, and `ready` raises.

    report_s: `ready` logs how far it is as often.
    """

    def __init__(
        self, registrar: Registrar, spans: Sequence[Span], *, report_s: float = 1.0
    ) -> None:
        self._report_s = report_s
        self._registrar = registrar
        self._total = sum(span.num_bytes for span in spans)
        self._num_spans = len(spans)
        self._pause_s = _PAUSE_S if self._total > _BACKGROUND_BYTES else 0.0
        self._changed = threading.Condition()
        self._absent = deque(spans)
        self._present: deque[Span] = deque()
        self._pinned: list[Span] = []
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._ended = threading.Event()  # all is pinned, or what was is undone
        count = min(_POPULATORS, self._num_spans)
        self._workers = [Worker(f"pdstore-populate-{i}", self._take_absent) for i in range(count)]
        self._workers.append(Worker("pdstore-register", self._take_present))

    @property
    def progress(self) -> float:
        """The part of the memory that is pinned, 0 to 1."""
        return sum(span.num_bytes for span in self._pinned) / max(1, self._total)

    def ready(self, timeout_s: float) -> None:
        """Waits until all of it is pinned; logs meanwhile how far it is.

        Raises what a piece failed with, or TimeoutError.
        """
        limit = Deadline(timeout_s)
        while not self.is_ready(min(self._report_s, limit.remaining_s())):
            if limit.is_over():
                raise TimeoutError(f"staging is {self._state()} after {timeout_s:.0f} s")
            log.info("staging is %s", self._state())

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Waits up to `wait_s`; True if all of it is pinned. Raises the error of a piece."""
        if not self._ended.wait(wait_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Unregisters everything, the last piece first; before the memory goes. Twice is fine."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        limit = Deadline(timeout_s)
        if not all(worker.join(limit.remaining_s()) for worker in self._workers):
            log.warning("staging is still being pinned at close")
            return
        self._roll_back()

    def _state(self) -> str:
        return f"pinned to {100 * self.progress:.0f} % of {self._total / 2**30:.1f} GiB"

    def _is_over(self) -> bool:
        return (
            self._error is not None
            or self._stopped.is_set()
            or len(self._pinned) == self._num_spans
        )

    def _take_absent(self) -> _Step | None:
        with self._changed:
            if self._is_over() or not self._absent:
                return None
            return _Step(partial(self._populate, self._absent.popleft()), self._fail)

    def _populate(self, span: Span) -> None:
        self._registrar.populate(*span)
        with self._changed:
            self._present.append(span)
            self._changed.notify_all()

    def _take_present(self) -> _Step | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._present)
            if not self._is_over():
                return _Step(partial(self._register, self._present.popleft()), self._fail)
        if self._error is not None:
            self._roll_back()
        self._ended.set()
        return None

    def _register(self, span: Span) -> None:
        self._registrar.register(*span)
        with self._changed:
            self._pinned.append(span)
            self._changed.notify_all()
        if self._pause_s:
            self._stopped.wait(self._pause_s)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _roll_back(self) -> None:
        with self._changed:
            pinned, self._pinned = self._pinned, []
        for span in reversed(pinned):
            self._unregister(span)

    def _unregister(self, span: Span) -> None:
        try:
            self._registrar.unregister(span.address)
        except SwapError as error:
            log.warning("staging: %s", error)


class _Step:
    """One piece's work on a worker."""

    def __init__(self, work: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        self.run, self.fail = work, fail
