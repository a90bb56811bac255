"""Putter: puts a batch and counts only what can be read afterwards.

Mooncake reports success for a put of a taken key and drops the bytes, even if the writer that took
it has not finished, or never will. So every put is followed by a look at its keys. The look also
leases them, so that a long prompt does not evict its own beginning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots
from pdstore.store.mooncake.batches import Batches
from pdstore.store.mooncake.codes import (
    ABSENT,
    NO_ROOM,
    RPC_TIMED_OUT,
    TRANSFER_FAILED,
    error_of,
    is_outage,
)

log = logging.getLogger(__name__)

PAUSES_S = (0.01, 0.03, 0.09)  # the master evicts after a put that found no room
PRESSURE_S = 1.0
WRITER_S = 1.0  # how long to wait for another writer of the same key
_QUICK_S = 1.0
_MOST_DOUBTS = 4096


class Doubts:
    """Keys that are taken but cannot be read: no put helps until the master frees them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[BlockKey, float] = {}

    def add(self, keys: Sequence[BlockKey]) -> None:
        now = time.monotonic()
        with self._lock:
            self._until = {key: end for key, end in self._until.items() if end > now}
            self._until |= dict.fromkeys(keys, now + self._seconds)
            while len(self._until) > _MOST_DOUBTS:
                del self._until[next(iter(self._until))]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def forget_all(self, prefix: str) -> None:
        with self._lock:
            self._until = {k: end for k, end in self._until.items() if not k.startswith(prefix)}

    def among(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        now = time.monotonic()
        with self._lock:
            return (
                {key for key in keys if self._until.get(key, 0.0) > now} if self._until else set()
            )


class Putter:
    """Puts batches for one store.

    num_stored: returns how many of the first keys are there, and leases them. Its errors count
      from its second argument.
    size_of: returns the size of a stored value, or the code that says why there is none.
    doubt_s: how long the master keeps a key for a writer that is gone.
    """

    def __init__(
        self,
        label: str,
        batches: Batches,
        num_stored: Callable[[Sequence[BlockKey], int], int],
        size_of: Callable[[BlockKey], int],
        doubt_s: float,
    ) -> None:
        self._label, self._batches = label, batches
        self._num_stored, self._size_of = num_stored, size_of
        self.doubts = Doubts(doubt_s)
        self._pressure_until = 0.0

    def put(self, keys: Sequence[BlockKey], slots: Slots, config: object, num_done: int) -> int:
        """Puts a batch; returns how many of its first keys can be read now.

        Raises StoreError, whose count starts from `num_done`.
        """
        doubted = self.doubts.among(keys)  # these are neither put nor waited for
        codes = self._try_all(keys, slots, config, doubted)
        for i, code in enumerate(codes):
            if is_outage(code):
                num_put = next(j for j in range(i + 1) if codes[j] < 0 or keys[j] in doubted)
                raise self._error(code, keys[i], num_done + num_put)
        stored = self._num_stored(keys, num_done)
        for _ in range(len(PAUSES_S)):
            if stored == len(keys) or codes[stored] < 0 or keys[stored] in doubted:
                break
            stored = self._wait_for_writer(keys, stored, num_done, doubted)
            if stored == len(keys) or keys[stored] in doubted:
                break
            rest = slots.part(stored, len(keys))  # evicted between its put and its lease
            codes[stored:] = self._try_all(keys[stored:], rest, config, doubted)
            stored += self._num_stored(keys[stored:], num_done + stored)
        self.doubts.forget(keys[:stored])
        if stored == len(keys) or keys[stored] in doubted:
            return stored
        if codes[stored] < 0:
            raise self._error(codes[stored], keys[stored], num_done + stored)
        raise StoreFull(
            f"{self._label}: {keys[stored]} is evicted as soon as it is put",
            num_done=num_done + stored,
        )

    def _try_all(
        self, keys: Sequence[BlockKey], slots: Slots, config: object, doubted: set[BlockKey]
    ) -> list[int]:
        """Puts the keys that are not in doubt, and again those that found no room."""
        codes = [0] * len(keys)
        self._try(
            [i for i, key in enumerate(keys) if key not in doubted], codes, keys, slots, config
        )
        for pause in () if time.monotonic() < self._pressure_until else PAUSES_S:
            if NO_ROOM not in codes:
                break
            time.sleep(pause)
            self._try(
                [i for i, code in enumerate(codes) if code == NO_ROOM], codes, keys, slots, config
            )
        if NO_ROOM in codes:
            self._pressure_until = time.monotonic() + PRESSURE_S
        return codes

    def _try(
        self,
        which: list[int],
        codes: list[int],
        keys: Sequence[BlockKey],
        slots: Slots,
        config: object,
    ) -> None:
        """Puts some of the keys, and once more those whose transfer failed at once."""
        for _ in range(2):
            if not which:
                return
            start = time.monotonic()
            part = replace(
                slots,
                numbers=[slots.numbers[i] for i in which],
                sizes=[slots.sizes[i] for i in which],
            )
            answers = self._batches.put([keys[i] for i in which], part, config)
            for i, code in zip(which, answers, strict=True):
                codes[i] = code
            if RPC_TIMED_OUT in answers:  # the master may still execute it later
                self.doubts.add([keys[i] for i in which if codes[i] == RPC_TIMED_OUT])
            if time.monotonic() - start > _QUICK_S:
                return
            which = [i for i in which if codes[i] == TRANSFER_FAILED]

    def _wait_for_writer(
        self, keys: Sequence[BlockKey], stored: int, num_done: int, doubted: set[BlockKey]
    ) -> int:
        """Waits while another writer of the first missing key is at work.

        Returns how many keys are stored then. A key whose writer does not finish is in doubt from
        then on, and is added to `doubted`.
        """
        end, pause = time.monotonic() + WRITER_S, 0.002
        while stored < len(keys) and self._size_of(keys[stored]) != ABSENT:
            stored += self._num_stored(keys[stored:], num_done + stored)
            if stored == len(keys):
                break
            if time.monotonic() > end:
                self.doubts.add([keys[stored]])
                doubted.add(keys[stored])
                log.warning(
                    "%s: %s is half-written by another client; not put again for a while",
                    self._label,
                    keys[stored],
                )
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return stored

    def _error(self, code: int, key: BlockKey, num_done: int) -> Exception:
        return error_of(code, f"{self._label}: put of {key}", num_done=num_done)
