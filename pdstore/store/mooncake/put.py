"""Putter: puts a batch and counts only what can be read afterwards.

Mooncake reports success for a put of a taken key and drops the bytes, even if the writer that took
it has not finished, or never will. So every put is followed by a search for its keys. The search
also leases them, so that a long prompt does not evict its own beginning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots
from pdstore.store.mooncake.batches import Batches
from pdstore.store.mooncake.library import (
    ABSENT,
    NO_ROOM,
    TRANSFER_FAILED,
    counted_from,
    error_of,
    is_outage,
)

log = logging.getLogger(__name__)

WRITER_S = 1.0  # how long to wait for another writer of the same key
_PAUSES_S = (0.01, 0.03, 0.09)  # the master evicts after a put that found no room
_PRESSURE_S = 1.0
_QUICK_S = 1.0
_MOST_EVICTIONS = 3


class Putter:
    """Puts batches for one store.

    num_stored: returns how many of the first keys are there, and leases them.
    size_of: returns the size of a stored value, or the code that says why there is none.
    """

    def __init__(
        self,
        label: str,
        batches: Batches,
        num_stored: Callable[[Sequence[BlockKey]], int],
        size_of: Callable[[BlockKey], int],
    ) -> None:
        self._label = label
        self._batches = batches
        self._num_stored = num_stored
        self._size_of = size_of
        self._pressure_until = 0.0

    def put(self, keys: Sequence[BlockKey], slots: Slots, config: object) -> int:
        """Puts a batch; returns how many of its first keys can be read now. Raises StoreError."""
        codes = self._put_with_room(keys, slots, config)
        num_put = next((i for i, code in enumerate(codes) if code < 0), len(keys))
        for key, code in zip(keys, codes, strict=True):
            if is_outage(code):
                raise error_of(code, f"{self._label}: put of {key}", num_done=num_put)
        stored, num_evictions = self._num_stored(keys), 0
        end, pause = time.monotonic() + WRITER_S, 0.002
        while stored < len(keys) and codes[stored] >= 0:
            what = f"{self._label}: {keys[stored]}"
            if self._size_of(keys[stored]) != ABSENT:  # another writer is at work
                if time.monotonic() > end:
                    log.warning("%s is half-written by another client", what)
                    return stored
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            elif num_evictions == _MOST_EVICTIONS:
                raise StoreFull(f"{what} is evicted as soon as it is put", num_done=stored)
            else:
                num_evictions += 1
                others = slots.part(stored, len(keys))
                codes[stored:] = self._put_with_room(keys[stored:], others, config)
            with counted_from(stored):
                stored += self._num_stored(keys[stored:])
        if stored < len(keys):
            what = f"{self._label}: put of {keys[stored]}"
            raise error_of(codes[stored], what, num_done=stored)
        return stored

    def _put_with_room(self, keys: Sequence[BlockKey], slots: Slots, config: object) -> list[int]:
        """Puts values, again those that found no room, and once more those that failed at once."""
        codes = [NO_ROOM] * len(keys)
        has_pressure = time.monotonic() < self._pressure_until
        for pause in (0.0,) if has_pressure else (0.0, *_PAUSES_S):
            time.sleep(pause)
            start = time.monotonic()
            self._put_those_with(NO_ROOM, codes, keys, slots, config)
            if TRANSFER_FAILED in codes and time.monotonic() - start < _QUICK_S:
                self._put_those_with(TRANSFER_FAILED, codes, keys, slots, config)
            if NO_ROOM not in codes:
                return codes
        self._pressure_until = time.monotonic() + _PRESSURE_S
        return codes

    def _put_those_with(
        self, code: int, codes: list[int], keys: Sequence[BlockKey], slots: Slots, config: object
    ) -> None:
        """Puts the values that have a code, and replaces their codes."""
        which = [i for i, each in enumerate(codes) if each == code]
        numbers = [slots.numbers[i] for i in which]
        part = replace(slots, numbers=numbers, sizes=[slots.sizes[i] for i in which])
        answers = self._batches.put([keys[i] for i in which], part, config)
        for i, answer in zip(which, answers, strict=True):
            codes[i] = answer
