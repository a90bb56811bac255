"""Host memory that copies use: pinned while the process does other things, and lent as slots."""

# Decision: docs/decisions/017-slots.md
from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import ByteSize

from pdstore.errors import ConfigError, SwapError
from pdstore.format.block import HEADER_BYTES
from pdstore.native.library import address_of
from pdstore.outcome import Direction
from pdstore.threads import Deadline, Worker
from pdstore.worker.swap.base import Registrar

log = logging.getLogger(__name__)

MIN_SLOTS = 16
_PAGE = 4096
SPAN_BYTES = 16 << 20
"""Registering stalls every kernel launch of the process meanwhile: 1 ms for this much."""
_BACKGROUND_BYTES = 4 << 30
_PAUSE_S = 0.002  # between pieces in the background, so that others can launch
_POPULATORS = 4


def slot_bytes_for(payload_bytes: int) -> int:
    """Size of a slot for payloads up to this: with the header, rounded up to 4 KiB."""
    return -(-(HEADER_BYTES + payload_bytes) // _PAGE) * _PAGE


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


class _Step(NamedTuple):
    """One piece's work on a worker."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class PinnedMemory:
    """Memory that is being pinned: made present by four threads, registered by one.

    Starts at once. When a piece fails, the registered ones are undone, and `ready` raises.

    view: the memory.
    slot_bytes: no slot of so many bytes is in two pieces.
    registrar: pins the pieces; None: any memory will do, and it stays as it is.
    report_s: `ready` logs how far it is as often.
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
        spans = []
        if registrar is not None:
            self._registrar = registrar
            spans = spans_of(address_of(view), len(view), slot_bytes, span_bytes)
        self._num_spans = len(spans)
        self._pause_s = _PAUSE_S if self.num_bytes > _BACKGROUND_BYTES else 0.0
        self._changed = threading.Condition()
        self._absent = deque(spans)
        self._present: deque[Span] = deque()
        self._pinned: list[Span] = []
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._ended = threading.Event()  # all is pinned, or what was is undone
        if not spans:
            self._ended.set()
        steps = [self._next_absent] * min(_POPULATORS, len(spans))
        self._workers = [Worker(f"pdstore-populate-{i}", step) for i, step in enumerate(steps)]
        if spans:
            self._workers.append(Worker("pdstore-register", self._next_present))

    @property
    def progress(self) -> float:
        """The part of the memory that is pinned, 0 to 1."""
        if not self._num_spans:
            return 1.0
        return sum(span.num_bytes for span in self._pinned) / self.num_bytes

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
        return f"pinned to {100 * self.progress:.0f} % of {self.num_bytes / 2**30:.1f} GiB"

    def _is_over(self) -> bool:
        return (
            self._error is not None
            or self._stopped.is_set()
            or len(self._pinned) == self._num_spans
        )

    def _next_absent(self) -> _Step | None:
        with self._changed:
            if self._is_over() or not self._absent:
                return None
            return _Step(partial(self._populate, self._absent.popleft()), self._fail)

    def _populate(self, span: Span) -> None:
        self._registrar.populate(*span)
        with self._changed:
            self._present.append(span)
            self._changed.notify_all()

    def _next_present(self) -> _Step | None:
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


class Staging:
    """Lends slots by number. A quarter of them is kept for loads and a quarter for saves.

    allocate: where the memory comes from (`Store.allocate`).
    num_bytes: what the user allows; as many whole slots as fit are made.
    registrar: as `PinnedMemory` takes it; no slot is lent before the memory is pinned.
    Raises ConfigError, with the size needed, when fewer than 16 fit; and when the host has not as
    much memory.
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
        self._reserved = self.num_slots // 4
        self._changed = threading.Condition()

    @property
    def num_lent(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def largest_loan(self) -> int:
        """Slots that one direction can have at once, whatever the other does."""
        return self.num_slots - self._reserved

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
        """`least` to `most` slots for the time of a `with`; waits until `least` are free.

        An empty list when the deadline passed or `is_over()` said that the job has ended. Nobody
        may wait here who holds slots: so no two jobs wait for each other. Raises why the memory
        cannot be pinned.
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
            self._give_back(direction, numbers)

    def _give_back(self, direction: Direction, numbers: Sequence[int]) -> None:
        with self._changed:
            self._free.extend(numbers)
            self._lent[direction] -= len(numbers)
            self._changed.notify_all()

    def _available(self, direction: Direction) -> int:
        """Free slots less those that are kept for the other direction; 0 before they are pinned."""
        if not self.memory.is_ready():
            return 0
        other = Direction.SAVE if direction is Direction.LOAD else Direction.LOAD
        kept = max(0, self._reserved - self._lent[other])
        return len(self._free) - kept
