"""PinnedMemory: host memory that is pinned by threads. Staging: lends slots of such memory."""

# Decision: docs/decisions/017-slots.md
from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

from pydantic import ByteSize

from pdstore.errors import ConfigError, Direction, SwapError
from pdstore.format.block import HEADER_BYTES
from pdstore.native.library import address_of
from pdstore.threads import Deadline, Worker
from pdstore.worker.swap.base import Registrar

log = logging.getLogger(__name__)

MIN_SLOTS = 16
_PAGE = 4096
SPAN_BYTES = 16 << 20
"""Bytes registered in one call: for 1 ms, no thread of the process can launch a kernel."""
_BACKGROUND_BYTES = 4 << 30
_SPAN_INTERVAL_S = 0.002  # between spans in the background, so that others can launch kernels
_POPULATORS = 4


def slot_bytes_for(payload_bytes: int) -> int:
    """Returns the slot size for a payload of so many bytes and its header: a multiple of 4 KiB."""
    return -(-(HEADER_BYTES + payload_bytes) // _PAGE) * _PAGE


Span: TypeAlias = tuple[int, int]
"""Address and number of bytes of memory that is registered in one call."""


def spans_of(address: int, num_bytes: int, slot_bytes: int, span_bytes: int) -> list[Span]:
    """Returns spans of about `span_bytes` each, made of whole slots: no slot lies in two spans.

    Raises ConfigError for memory or slots that are not whole pages.
    """
    if address % _PAGE or slot_bytes % _PAGE:
        raise ConfigError("only memory of whole pages can be pinned")
    step = max(1, span_bytes // slot_bytes) * slot_bytes
    return [(address + at, min(step, num_bytes - at)) for at in range(0, num_bytes, step)]


class _Step(NamedTuple):
    """The task to pin one span, for a thread of `PinnedMemory`."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class PinnedMemory:
    """Memory that threads pin: four fault in its pages; only one at a time registers a span.

    The constructor starts the threads. If a span fails, all spans are unregistered; `ready` raises.

    slot_bytes: the size of a slot; no slot lies in two spans.
    registrar: pins the spans; None: copies can use any memory, so nothing is pinned.
    report_s: seconds between the lines in which `ready` logs the progress.
    Raises ConfigError for memory or slots that are not whole pages.
    """

    def __init__(
        self,
        view: memoryview,
        slot_bytes: int,
        registrar: Registrar | None,
        *,
        span_bytes: int = SPAN_BYTES,
        report_s: float = 1.0,
    ) -> None:
        self.num_bytes = len(view)
        self._report_s = report_s
        self._is_needed = registrar is not None
        self._span_interval_s = _SPAN_INTERVAL_S if self.num_bytes > _BACKGROUND_BYTES else 0.0
        self._left: deque[Span] = deque()
        self._pinned: list[Span] = []
        self._lock = threading.Lock()  # one span is registered at a time
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._ended = threading.Event()  # all is pinned, or all is unpinned again
        self._workers: list[Worker] = []
        if registrar is None:
            self._ended.set()
            return
        self._registrar = registrar
        self._left.extend(spans_of(address_of(view), len(view), slot_bytes, span_bytes))
        self._num_at_work = min(_POPULATORS, len(self._left))
        for i in range(self._num_at_work):
            self._workers.append(Worker(f"pdstore-pin-{i}", self._next_step))

    @property
    def progress(self) -> float:
        """The fraction of the memory that is pinned, 0 to 1."""
        if not self._is_needed:
            return 1.0
        return sum(num_bytes for _, num_bytes in self._pinned) / self.num_bytes

    def ready(self, timeout_s: float) -> None:
        """Waits until all of the memory is pinned; logs the progress meanwhile.

        Raises the error of a span that failed, or TimeoutError.
        """
        deadline = Deadline(timeout_s)
        while not self.is_ready(min(self._report_s, deadline.remaining_s())):
            if deadline.is_over():
                raise TimeoutError(f"staging is {self._state()} after {timeout_s:.0f} s")
            log.info("staging is %s", self._state())

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s`; True if all is pinned. Raises the error of a failed span."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Unregisters all spans, the last one first. Call it before the memory is freed."""
        self._stopped.set()
        deadline = Deadline(timeout_s)
        if not all(worker.join(deadline.remaining_s()) for worker in self._workers):
            log.warning("staging is still being pinned at close")
            return
        self._undo()

    def _state(self) -> str:
        return f"pinned to {100 * self.progress:.0f} % of {self.num_bytes / 2**30:.1f} GiB"

    def _next_step(self) -> _Step | None:
        """Returns the task for the next span, or None at the end; the last thread sets `_ended`."""
        with self._lock:
            if self._left and not self._is_over():
                return _Step(partial(self._pin, self._left.popleft()), self._fail)
            self._num_at_work -= 1
            is_last = self._num_at_work == 0
        if is_last:
            if self._error is not None:
                self._undo()
            self._ended.set()
        return None

    def _pin(self, span: Span) -> None:
        self._registrar.populate(*span)
        with self._lock:
            if not self._is_over():
                self._registrar.register(*span)
                self._pinned.append(span)
                self._stopped.wait(self._span_interval_s)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    def _is_over(self) -> bool:
        return self._error is not None or self._stopped.is_set()

    def _undo(self) -> None:
        while self._pinned:
            address, _ = self._pinned.pop()
            try:
                self._registrar.unregister(address)
            except SwapError as error:
                log.warning("staging: %s", error)


class Staging:
    """Lends slots by number. A quarter of them is kept for loads and a quarter for saves.

    allocate: returns the memory (`Store.allocate`).
    num_bytes: the limit that the user sets; the memory has as many whole slots as fit.
    registrar: as `PinnedMemory` takes it; no slot is lent before the memory is pinned.
    Raises ConfigError, with the size that is needed, if fewer than 16 slots fit. Raises it also if
    the host has too little memory.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview],
        payload_bytes: int,
        num_bytes: int,
        registrar: Registrar | None = None,
        span_bytes: int = SPAN_BYTES,
    ) -> None:
        self.slot_bytes = slot_bytes_for(payload_bytes)
        self.num_slots = num_bytes // self.slot_bytes
        if self.num_slots < MIN_SLOTS:
            need = -(-MIN_SLOTS * self.slot_bytes >> 20)
            given, slot = (ByteSize(n).human_readable() for n in (num_bytes, self.slot_bytes))
            raise ConfigError(
                f"PDSTORE_STAGING={given} holds {self.num_slots} values of a block, up to {slot}"
                f" each, and {MIN_SLOTS} are needed: set it to {need}MiB or more, or"
                " PDSTORE_BLOCK_TOKENS to less, the same for P and D"
            )
        try:
            self.view = allocate(self.num_slots * self.slot_bytes)
        except (OSError, MemoryError) as error:
            raise ConfigError(
                f"PDSTORE_STAGING of {num_bytes >> 20} MiB: this host does not give so much memory"
                f" ({error}): set it to less"
            ) from error
        self.memory = PinnedMemory(self.view, self.slot_bytes, registrar, span_bytes=span_bytes)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._lent = dict.fromkeys(Direction, 0)
        self._reserved_per_direction = self.num_slots // 4
        self._changed = threading.Condition()

    @property
    def num_lent(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def largest_loan(self) -> int:
        """The maximum number of slots that all saves, or all loads, can have together."""
        return self.num_slots - self._reserved_per_direction

    @contextlib.contextmanager
    def loan(
        self,
        direction: Direction,
        most: int,
        *,
        least: int,
        deadline: Deadline,
        is_over: Callable[[], bool],
    ) -> Iterator[list[int]]:
        """Lends `least` to `most` slots for the time of a `with`; waits until `least` are free.

        The list is empty if the deadline has passed or `is_over()` says that the job has ended. A
        caller that holds slots must not wait here, so that no two jobs wait for each other. If the
        memory could not be pinned, raises the error of the pinning.
        """
        numbers: list[int] = []
        with self._changed:
            while (available := self._available(direction)) < least:
                if deadline.is_over() or is_over():
                    break
                self._changed.wait(min(0.05, deadline.remaining_s()))
            else:
                count = min(most, available)
                self._lent[direction] += count
                numbers = [self._free.pop() for _ in range(count)]
        try:
            yield numbers
        finally:
            with self._changed:
                self._free.extend(numbers)
                self._lent[direction] -= len(numbers)
                self._changed.notify_all()

    def _available(self, direction: Direction) -> int:
        """Returns how many free slots a direction may use: 0 before the memory is pinned."""
        if not self.memory.is_ready():
            return 0
        other = Direction.SAVE if direction is Direction.LOAD else Direction.LOAD
        kept = max(0, self._reserved_per_direction - self._lent[other])
        return len(self._free) - kept
