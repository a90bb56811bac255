"""ReadWatch: tells when a read of a tier takes so long that the tier must be taken for hung."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdstore.errors import BadValue, StoreError
from pdstore.threads import CallBeside

LEAST_S = 1.0
"""Seconds that a read may take, however little it reads."""
LEAST_BYTES_PER_S = 50_000_000
"""A tier that reads more slowly is left out: loads from it would be slower than most prompts."""


class _Read(NamedTuple):
    began_at: float
    num_bytes: int
    probe: Callable[[], object]


class ReadWatch:
    """Keeps the reads of one tier that are under way, and notices that none of them ends.

    The tier hangs if no read was answered for `least_s` and the time that all bytes under way take
    at `bytes_per_s`, counted from the last answer or from the first of these reads. Then a probe
    reads one of their values into memory of its own, beside the callers. The tier hangs until the
    probe or one of the reads is answered. A read that fails is no answer, but one that ends is
    waited for no longer. Any thread may call it.
    """

    def __init__(
        self,
        *,
        least_s: float = LEAST_S,
        bytes_per_s: float = LEAST_BYTES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least_s = least_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: set[_Read] = set()
        self._answered_at = clock()
        self._probe: CallBeside[object] | None = None

    @contextlib.contextmanager
    def reading(self, num_bytes: int, probe: Callable[[], object]) -> Iterator[None]:
        """Keeps a read of so many bytes until its end.

        probe: reads one of the same values into other memory. Raises StoreError.
        """
        read = _Read(self._clock(), num_bytes, probe)
        is_answer = False
        with self._lock:
            self._reads.add(read)
        try:
            yield
            is_answer = True
        except BadValue:
            is_answer = True
            raise
        finally:
            with self._lock:
                self._reads.discard(read)
            if is_answer:
                self._answered_at = self._clock()

    def is_hung(self) -> bool:
        """True while no read of the tier is answered in time; then a probe is under way."""
        if not self._reads:
            return False
        with self._lock:
            reads = sorted(self._reads, key=lambda read: read.began_at)
            if not reads or not self._is_late(reads):
                return False
            if self._probe is None or self._probe.has_ended():
                probe = reads[0].probe
                with contextlib.suppress(RuntimeError):  # no thread can start now
                    self._probe = CallBeside("pdstore-tier-probe", lambda: self._answered(probe))
        return True

    def _is_late(self, reads: list[_Read]) -> bool:
        """True if the reads, the first one first, should have been answered by now."""
        since = max(reads[0].began_at, self._answered_at)
        num_bytes = sum(read.num_bytes for read in reads)
        return self._clock() - since > self._least_s + num_bytes / self._bytes_per_s

    def _answered(self, probe: Callable[[], object]) -> None:
        with contextlib.suppress(StoreError):  # the tier's breaker counts it
            probe()
            self._answered_at = self._clock()
