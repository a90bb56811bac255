"""RoomWatch: shows how full a store is, where it tells."""

from __future__ import annotations

import contextlib
import time

from pdstore.errors import StoreError
from pdstore.metrics import Metrics
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.optional import Room, TellsRoom
from pdstore.threads import Ticker

_REST = 50  # times as long as the look took: it may go through every value


class RoomWatch:
    """Asks a store for its room every `every_s` seconds, on a thread of its own.

    A store that cannot tell gets no thread; one that errs keeps its last numbers.
    """

    def __init__(self, store: Store, metrics: Metrics, every_s: float = 15.0) -> None:
        self._teller = find_optional(store, TellsRoom)
        self._metrics, self._every_s = metrics, every_s
        self._num_evicted: int | None = None
        self._thread = Ticker("pdstore-room", self._look) if self._teller else None
        if self._thread is not None:
            self._thread.wake()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def _look(self) -> float:
        assert self._teller is not None
        started_at = time.monotonic()
        with contextlib.suppress(StoreError):  # the calls that need the store report it
            self._show(self._teller.room())
        return max(self._every_s, _REST * (time.monotonic() - started_at))

    def _show(self, room: Room) -> None:
        self._metrics.store_used_bytes.set(room.used_bytes or 0)
        self._metrics.store_capacity_bytes.set(room.capacity_bytes or 0)
        if room.num_evicted is not None:
            before = room.num_evicted if self._num_evicted is None else self._num_evicted
            self._metrics.store_evictions.inc(max(0, room.num_evicted - before))
            self._num_evicted = room.num_evicted
