"""Copier: copies blocks from the first tier to one lower tier, behind the puts that stored them."""

# Decision: docs/decisions/048-write-behind.md
from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdstore.errors import StoreClosed, StoreError, StoreTimeout, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.store.admission import Admission
from pdstore.store.base import Slots, Store, count_of, num_done_of, stored_among
from pdstore.store.optional import EvictsByUse, FindsKeys, PeeksValues
from pdstore.store.tiers.copy_queue import CopyQueue
from pdstore.store.tiers.purges import PurgeWatch, Sample, namespaces_of
from pdstore.threads import Deadline, Ticker

BATCH_BYTES = 128 << 20
"""A batch costs Python the same whatever its length, and the engine waits for that meanwhile."""
COPY_BYTES_PER_S = 500_000_000
WAITING_BYTES = 16 << 30
"""The most bytes of values that wait for their copies: only their keys take memory."""
PAUSE_S = 1.0  # between two looks whether a tier that failed is back
LONGEST_PAUSE_S = 8.0
_MOST_TRIES = 10
"""How often values are copied whose tier fails each time, though it answers other calls."""
MOST_USED = 1 << 17
"""The most keys, each in about 130 bytes, whose use waits to be counted below; beyond that the
oldest use is forgotten."""
_PAGE = 4096

NumRight = Callable[[Sequence[memoryview]], int]
"""A function that verifies values, and returns how many leading ones are right."""


class Copier:
    """Copies values of the first tier down, on a thread that the first `add` starts.

    It reads a batch of values from the first tier, verifies them, and puts them into the lower one.
    Then it looks again. What is gone from the first tier by now may have been wrong, so it is
    removed below; and so is the whole batch if a purge has begun (`PurgeWatch`). If that fails, it
    is tried again before more is copied. A value that is gone from the first tier, or is wrong
    there, counts as lost. A value that the lower tier refuses or that a purge forbids to copy, and
    all that wait behind a value that is not copied, count as given up. Values at which a tier fails
    wait again, in front of all others. If the lower tier would have to evict for a put, the
    admission decides once for all of it; a put that it refuses counts as not admitted.

    admission: None: all is admitted.
    purges: tells whether a purge forbids copies; None for one of its own.
    is_out: returns True while the lower tier does not answer; keys then wait.
    num_right: verifies values; returns how many leading ones are right.
    bytes_per_s: the most bytes that this process copies down in a second, on average.
    """

    def __init__(
        self,
        first: Store,
        lower: Store,
        *,
        is_out: Callable[[], bool],
        num_right: NumRight,
        purges: PurgeWatch | None = None,
        bytes_per_s: int = COPY_BYTES_PER_S,
        waiting_bytes: int = WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = first
        self._lower = lower
        self._finder = lower.optional(FindsKeys)
        self._finder_above = first.optional(FindsKeys)
        peeks = first.optional(PeeksValues)
        self._read_above = peeks.peek if peeks is not None else first.get
        self._by_use = lower.optional(EvictsByUse)
        self.admission: Admission | None = None
        self._is_decided = False  # True: the admission has admitted the present put
        self._is_out = is_out
        self._num_right = num_right
        self._purges = purges or PurgeWatch(first, lower)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._queue = CopyQueue(waiting_bytes)
        self._copying = threading.Lock()  # held while values are copied
        self._next = threading.Lock()  # held to wait for `_copying`: else batches would overtake
        self._lock = threading.Lock()
        self._thread: Ticker | None = None
        self._is_closed = False
        self._next_at = 0.0
        self._memory = memoryview(b"")
        self._counts: Counter[str] = Counter()
        self._to_take_back: set[BlockKey] = set()
        self._uses: deque[Sequence[BlockKey]] = deque()
        self._num_used = 0  # keys of `_uses`
        self._failed_at: BlockKey | None = None  # of the batch: where a tier failed
        self._num_tries = 0  # since values were copied

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of values that were copied, given up, lost and not admitted so far."""
        return {
            "copied": self._counts["copied"],
            "given_up": self._queue.num_given_up,
            "lost": self._counts["lost"],
            "not_admitted": self._queue.num_not_admitted,
        }

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the values that wait for their copies."""
        return self._queue.num_bytes

    @property
    def delay_s(self) -> float:
        """Seconds until what is queued now is copied, at the highest rate."""
        return self._queue.num_bytes / self._bytes_per_s

    def add(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Queues the keys of one put, with the lengths of their values."""
        self._queue.add(keys, sizes)
        self._wake()

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Counts a use of those keys that the lower tier has, as `EvictsByUse.use` does, later.

        Else a block that is found above each time would be the lower tier's oldest.
        """
        if self._by_use is not None and keys:
            with self._lock:
                self._uses.append(keys)
                self._num_used += len(keys)
                while self._num_used > MOST_USED and len(self._uses) > 1:
                    self._num_used -= len(self._uses.popleft())
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._thread.wake()
            elif not self._is_closed:
                with contextlib.suppress(RuntimeError):  # no thread can start now; the next add may
                    self._thread = Ticker("pdstore-tier-copies", self._turn)

    @contextlib.contextmanager
    def stopped(self, is_dropped: Callable[[BlockKey], bool], timeout_s: float) -> Iterator[None]:
        """Drops waiting keys and waits for the copy under way; begins no copy before the end.

        If that copy has not ended after `timeout_s`, goes on beside it: the copier itself removes
        what it has copied and is gone from the first tier by then.
        """
        deadline = Deadline(timeout_s)
        has_ended = False
        if self._next.acquire(timeout=timeout_s):
            has_ended = self._copying.acquire(timeout=deadline.remaining_s())
            self._next.release()
        try:
            self._queue.drop(is_dropped)
            yield
        finally:
            if has_ended:
                self._copying.release()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all values are copied; returns False after `timeout_s`."""
        return self._queue.wait_until_empty(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and copies nothing more."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            thread.stop(timeout_s)

    def _turn(self) -> float | None:
        """Copies one batch; returns the seconds until the next one, None if nothing waits."""
        began_at = self._clock()
        has_work = self._queue.num_bytes or self._to_take_back or self._uses
        if self._is_closed or not has_work:
            return None
        if began_at < self._next_at:
            return self._next_at - began_at
        if self._is_out():
            return PAUSE_S
        with self._next:
            self._copying.acquire()
        try:
            if not self._take_back():
                return PAUSE_S
            self._copy_batch(began_at)
            if not self._queue.num_bytes or self._num_used > MOST_USED // 2:
                self._count_use()
        finally:
            self._copying.release()
        pause_s = min(PAUSE_S * 2**self._num_tries / 2, LONGEST_PAUSE_S)
        return max(pause_s if self._num_tries else 0.0, self._next_at - self._clock())

    def _count_use(self) -> None:
        """Counts a use in the lower tier, after the copies that were queued before, if possible.

        A copy is used later than what was there, and the last block of a chain must go first. It
        counts one use in a turn: removals wait for a turn.
        """
        with self._lock:
            keys = self._uses.popleft() if self._uses else ()
            self._num_used -= len(keys)
        if keys and self._by_use is not None:
            if self._finder is not None:  # it may end at the first key that is missing
                missing = _missing(self._lower, self._finder, keys)
                keys = [key for key in keys if key not in missing]
            with contextlib.suppress(StoreError):
                self._by_use.use(keys)

    def _copy_batch(self, began_at: float) -> None:
        """Copies the values of a batch that the lower tier lacks.

        Those that the tier has already count for nothing in the rate, and need no admission. The
        purge numbers are read first: what a tier has that has missed a purge counts for nothing.
        """
        batch = self._queue.take(BATCH_BYTES)
        if not batch:
            return
        if self._queue.is_new_put:
            self._is_decided = False
        num_given_up = len(batch)
        is_short = True
        is_admitted = True
        try:
            keys = [key for key, _ in batch]
            samples = self._samples(keys)
            finder = self._finder if samples is not None else None
            missing = _missing(self._lower, finder, keys)
            rest = [(key, size) for key, size in batch if key in missing]
            is_admitted = not rest or self._is_admitted([size for _, size in rest])
            if is_admitted:
                self._next_at = began_at + sum(size for _, size in rest) / self._bytes_per_s
                num_given_up, is_short = self._copy(rest, samples)
            else:
                num_given_up = len(rest)
        finally:
            self._queue.end(num_given_up, is_short=is_short, is_admitted=is_admitted)

    def _is_admitted(self, sizes: Sequence[int]) -> bool:
        """True if the lower tier has room for a put, or may evict its oldest value for it.

        The first values of a put that the tier lacks decide for all that waits behind them, too:
        a block is of no use without those before it.
        """
        if self._is_decided or self.admission is None or self._by_use is None:
            return True
        oldest_s = None
        with contextlib.suppress(StoreError):  # the copy meets the error
            oldest_s = self._by_use.oldest_age_s([*sizes, *self._queue.sizes_behind()])
        self._is_decided = oldest_s is None or self.admission.admits(oldest_s)
        return self._is_decided

    def _copy(
        self, batch: Sequence[tuple[BlockKey, int]], samples: Mapping[str, Sample] | None
    ) -> tuple[int, bool]:
        """Copies values that the lower tier lacks; returns how many of them are given up.

        The second item is True if not all were copied, whether they are given up or lost. Puts back
        those at which a tier failed, and those behind them.
        """
        if not batch:
            self._num_tries = 0
            return 0, False
        keys = [key for key, _ in batch]
        num_right = num_copied = 0
        if samples is not None:
            slots = self._slots([size for _, size in batch])
            num_right = self._read(keys, slots)
            num_copied = self._write(keys[:num_right], slots, samples)
        if self._is_to_try_again(num_copied, keys):
            self._queue.put_back(keys[num_copied:])
            return 0, False
        is_lost = samples is not None and num_copied == num_right < len(keys)
        self._counts["lost"] += is_lost
        return len(keys) - num_copied - is_lost, num_copied < len(keys)

    def _is_to_try_again(self, num_copied: int, keys: Sequence[BlockKey]) -> bool:
        """True if a tier failed at the first key that is not copied, and not for ever.

        After `_MOST_TRIES` it is the value that the tier cannot take, and others wait behind it.
        """
        has_failed = num_copied < len(keys) and keys[num_copied] == self._failed_at
        num_tries = 1 if num_copied else self._num_tries + 1
        self._num_tries = num_tries if has_failed and num_tries < _MOST_TRIES else 0
        return self._num_tries > 0

    def _samples(self, keys: Sequence[BlockKey]) -> Mapping[str, Sample] | None:
        """Reads the purge numbers before a copy; None if a purge forbids it, or if that fails."""
        self._failed_at = None
        try:
            return self._purges.before_copies(namespaces_of(keys))
        except StoreError as error:
            self._note_failure(error, keys)
            return None

    def _write(self, keys: Sequence[BlockKey], slots: Slots, samples: Mapping[str, Sample]) -> int:
        """Puts values into the lower tier; returns how many leading ones it took."""
        if not keys:
            return 0
        num_copied = 0
        with contextlib.suppress(StoreClosed):
            num_copied = self._num_done(self._lower, self._lower.put, keys, slots)
        gone = self._wrong_below(keys, samples)
        if gone is None:  # a put that failed may have stored values, too
            num_copied, gone = 0, set(keys)
        self._to_take_back |= gone
        self._take_back()
        num_lost = len(gone.intersection(keys[:num_copied]))
        self._counts["lost"] += num_lost
        self._counts["copied"] += num_copied - num_lost
        return num_copied

    def _wrong_below(
        self, keys: Sequence[BlockKey], samples: Mapping[str, Sample]
    ) -> set[BlockKey] | None:
        """Returns which keys must not stay in the lower tier; None if that cannot be found out."""
        try:
            is_purged = not self._purges.are_current(samples)
            return set(keys) if is_purged else self._gone_from_above(keys)
        except StoreError as error:
            self._note_failure(error, keys)
            return None

    def _take_back(self) -> bool:
        """Removes below what was gone from the first tier after its copy; False if that failed."""
        if self._to_take_back:
            try:
                self._lower.remove(list(self._to_take_back))
            except StoreError:
                return False
            self._to_take_back.clear()
        return True

    def _gone_from_above(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns the keys that the first tier lacks. Raises StoreError."""
        if self._finder_above is not None:
            stored = self._finder_above.which_stored(keys)
            return set(keys) - stored_among(stored, keys, self._first)
        gone: list[BlockKey] = []
        rest = keys
        while rest:  # a match tells one missing key at a time
            num_there = count_of(self._first.match(rest), rest, self._first)
            gone += rest[num_there : num_there + 1]
            rest = rest[num_there + 1 :]
        return set(gone)

    def _read(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Reads values from the first tier; returns how many leading ones are there and right."""
        num_read = 0
        with contextlib.suppress(StoreClosed):
            num_read = self._num_done(self._first, self._read_above, keys, slots)
        return self._num_right([slots.value(i) for i in range(num_read)])

    def _num_done(
        self,
        store: Store,
        call: Callable[[Sequence[BlockKey], Slots], int],
        keys: Sequence[BlockKey],
        slots: Slots,
    ) -> int:
        """Makes a get or a put of leading slots; returns how many leading keys it served."""
        try:
            return count_of(call(keys, slots.part(0, len(keys))), keys, store)
        except StoreClosed:
            raise
        except StoreError as error:
            num_done = num_done_of(error, keys)
            self._note_failure(error, keys[num_done:])
            return num_done

    def _note_failure(self, error: StoreError, rest: Sequence[BlockKey]) -> None:
        """Notes at which key a tier failed, unless the error is about the value of that key."""
        if isinstance(error, StoreUnavailable | StoreTimeout):
            self._failed_at = next(iter(rest), None)

    def _slots(self, sizes: Sequence[int]) -> Slots:
        slot_bytes = max(sizes, default=1)
        num_bytes = -(-slot_bytes * len(sizes) // _PAGE) * _PAGE
        if len(self._memory) < num_bytes:
            self._memory = self._first.allocate(max(num_bytes, BATCH_BYTES))
        return Slots(self._memory, slot_bytes, range(len(sizes)), sizes)


def _missing(store: Store, finder: FindsKeys | None, keys: Sequence[BlockKey]) -> set[BlockKey]:
    """Returns the keys that a tier lacks; all, if it cannot tell."""
    if finder is not None:
        with contextlib.suppress(StoreError):
            return set(keys) - stored_among(finder.which_stored(keys), keys, store)
    return set(keys)
