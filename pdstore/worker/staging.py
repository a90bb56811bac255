"""A fixed ring of host slots that blocks pass through: lent to jobs a window at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from pydantic import ByteSize

from pdstore.errors import ConfigError
from pdstore.format.block import HEADER_BYTES
from pdstore.native.library import address_of
from pdstore.outcome import Direction
from pdstore.threads import Deadline
from pdstore.worker.pinned_memory import SPAN_BYTES, PinnedMemory, spans_of
from pdstore.worker.swap.base import Registrar

MIN_SLOTS = 16
_ALIGN = 4096


def slot_bytes_for(payload_bytes: int) -> int:
    """Size of a slot for payloads up to this: with the header, rounded up to 4 KiB."""
    return -(-(HEADER_BYTES + payload_bytes) // _ALIGN) * _ALIGN


class Staging:
    """Lends slots by number. A quarter of them is kept for loads and a quarter for saves.

    allocate: where the memory comes from (`Store.allocate`).
    num_bytes: what the user allows; as many whole slots as fit are made.
    registrar: pins the memory, from now on; no slot is lent before. None: it stays as it is.
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
        self._pinned: PinnedMemory | None = None
        if registrar is not None:
            spans = spans_of(address_of(self.view), len(self.view), self.slot_bytes, span_bytes)
            self._pinned = PinnedMemory(registrar, spans)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._lent = dict.fromkeys(Direction, 0)
        self._reserved = self.num_slots // 4
        self._changed = threading.Condition()

    def ready(self, timeout_s: float) -> None:
        """Waits until the memory is pinned. Raises why it cannot be, or TimeoutError."""
        if self._pinned is not None:
            self._pinned.ready(timeout_s)

    @property
    def num_bytes(self) -> int:
        return len(self.view)

    @property
    def progress(self) -> float:
        """Which part of the memory is ready for copies, 0 to 1."""
        return 1.0 if self._pinned is None else self._pinned.progress

    def close(self) -> None:
        """Unpins the memory; no copy may be on its way. Twice is fine."""
        if self._pinned is not None:
            self._pinned.close()

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
        numbers = self._take(direction, most, least, deadline, is_over)
        try:
            yield numbers
        finally:
            self._give_back(direction, numbers)

    def _take(
        self,
        direction: Direction,
        most: int,
        least: int,
        deadline: Deadline,
        is_over: Callable[[], bool],
    ) -> list[int]:
        with self._changed:
            while (available := self._available(direction)) < least:
                if deadline.is_over() or is_over():
                    return []
                self._changed.wait(min(0.05, deadline.remaining_s()))
            count = min(most, available)
            self._lent[direction] += count
            return [self._free.pop() for _ in range(count)]

    def _give_back(self, direction: Direction, numbers: Sequence[int]) -> None:
        with self._changed:
            self._free.extend(numbers)
            self._lent[direction] -= len(numbers)
            self._changed.notify_all()

    def _available(self, direction: Direction) -> int:
        """Free slots less those that are kept for the other direction; 0 before they are pinned."""
        if self._pinned is not None and not self._pinned.is_ready():
            return 0
        other = Direction.SAVE if direction is Direction.LOAD else Direction.LOAD
        kept = max(0, self._reserved - self._lent[other])
        return len(self._free) - kept
