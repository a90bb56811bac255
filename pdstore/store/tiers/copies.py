"""Copier: copies blocks from the first tier to one lower tier, behind the puts that stored them."""

# Decision: docs/decisions/048-write-behind.md
from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdstore.errors import StoreClosed, StoreError
from pdstore.format.keys import BlockKey
from pdstore.store.admission import Admission
from pdstore.store.base import Slots, Store, count_of, num_done_of, stored_among
from pdstore.store.optional import EvictsByUse, FindsKeys
from pdstore.threads import Ticker

BATCH_BYTES = 32 << 20
COPY_BYTES_PER_S = 500_000_000
WAITING_BYTES = 16 << 30
"""The most bytes of values that wait for their copies: only their keys take memory."""
_PAUSE_S = 1.0  # between two looks whether a tier that failed is back
_PAGE = 4096

_Put = deque[tuple[BlockKey, int]]  # keys of one put that wait, each with the size of its value


class CopyQueue:
    """The keys that wait for their copies, first in, first out, each with those of its put.

    No block is of use without the blocks before it. So a block that is given up takes all that wait
    behind it in its put with it. Beyond `most_bytes`, the end of the oldest put is given up.
    Any thread may call it.

    is_new_put: True if the last `take` took the first keys of a put.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._puts: deque[_Put] = deque()
        self._waiting: set[BlockKey] = set()
        self._taken: _Put | None = None  # the put of which keys are being copied
        self._last: _Put | None = None
        self.is_new_put = False
        self.num_bytes = 0
        self.num_given_up = 0
        self.num_not_admitted = 0

    def __len__(self) -> int:
        """The number of puts that it keeps."""
        return len(self._puts)

    def add(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Adds the keys of one put, except those that wait already."""
        with self._changed:
            pairs = zip(keys, sizes, strict=True)
            put = deque((key, size) for key, size in pairs if key not in self._waiting)
            if put:  # else the same prompts, saved again in a long outage, would fill the memory
                self._puts.append(put)
            self._waiting.update(key for key, _ in put)
            self.num_bytes += sum(size for _, size in put)
            while self.num_bytes > self._most_bytes:
                self._skip_empty()
                self._forget(*self._puts[0].pop())
                self.num_given_up += 1

    def take(self, most_bytes: int) -> list[tuple[BlockKey, int]]:
        """Takes leading keys of the oldest put, whose values fit `most_bytes` in equal slots.

        Takes one key that alone is larger. `end` must follow, unless the result is empty.
        """
        taken: list[tuple[BlockKey, int]] = []
        with self._changed:
            self._skip_empty()
            put = self._puts[0] if self._puts else _Put()
            slot_bytes = 0
            while put:
                slot_bytes = max(slot_bytes, put[0][1])
                if taken and slot_bytes * (len(taken) + 1) > most_bytes:
                    break
                taken.append(put.popleft())
                self._forget(*taken[-1])
            self._taken = put if taken else None
            self.is_new_put = put is not self._last
            self._last = put
        return taken

    def end(self, num_given_up: int, *, is_short: bool = False, is_admitted: bool = True) -> None:
        """Ends what `take` began. If values were given up, so is what waits behind them.

        is_short: True if what waits behind is given up also without that, as behind a lost value.
        is_admitted: False if the values were not given up, but the admission refused the put.
        """
        with self._changed:
            while (num_given_up or is_short) and self._taken:
                self._forget(*self._taken.pop())
                num_given_up += 1
            if is_admitted:
                self.num_given_up += num_given_up
            else:
                self.num_not_admitted += num_given_up
            self._taken = None
            self._changed.notify_all()

    def sizes_behind(self) -> list[int]:
        """Returns the lengths of the values that wait behind those taken, in their put."""
        with self._changed:
            return [size for _, size in self._taken or ()]

    def drop(self, is_dropped: Callable[[BlockKey], bool]) -> None:
        """Forgets waiting keys, which are not counted as given up."""
        with self._changed:
            for put in self._puts:
                pairs = list(put)
                put.clear()
                for key, size in pairs:
                    if is_dropped(key):
                        self._forget(key, size)
                    else:
                        put.append((key, size))
            self._puts = deque(put for put in self._puts if put)
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no key waits and no copy is under way; returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._taken is None, timeout_s
            )

    def _forget(self, key: BlockKey, size: int) -> None:
        self._waiting.discard(key)
        self.num_bytes -= size

    def _skip_empty(self) -> None:
        while self._puts and not self._puts[0]:
            self._puts.popleft()


class Copier:
    """Copies values of the first tier down, on a thread that the first `add` starts.

    It reads a batch of values from the first tier, verifies them, and puts them into the lower one.
    Then it asks the first tier again: what is gone from there by now, another process may have
    cleared before the copy, so it is removed below. If that fails, it is tried again before more is
    copied. A value that is gone from the first tier, or is wrong there, counts as lost. A value
    that the lower tier refuses, and all that wait behind a value that is not copied, count as given
    up. If the lower tier would have to evict for a put, the admission decides once for all of it; a
    put that it refuses counts as not admitted.

    admission: None: all is admitted.
    is_out: returns True while the lower tier does not answer; keys then wait.
    is_right: verifies a value.
    bytes_per_s: the most bytes that this process copies down in a second, on average.
    """

    def __init__(
        self,
        first: Store,
        lower: Store,
        *,
        is_out: Callable[[], bool],
        is_right: Callable[[memoryview], bool],
        bytes_per_s: int = COPY_BYTES_PER_S,
        waiting_bytes: int = WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = first
        self._lower = lower
        self._finder = lower.optional(FindsKeys)
        self._finder_above = first.optional(FindsKeys)
        self._by_use = lower.optional(EvictsByUse)
        self.admission: Admission | None = None
        self._is_decided = False  # True: the admission has admitted the present put
        self._is_out = is_out
        self._is_right = is_right
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._queue = CopyQueue(waiting_bytes)
        self._copying = threading.Lock()  # held while values are copied
        self._lock = threading.Lock()
        self._thread: Ticker | None = None
        self._is_closed = False
        self._next_at = 0.0
        self._memory = memoryview(b"")
        self._counts: Counter[str] = Counter()
        self._to_take_back: set[BlockKey] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of values that were copied, given up, lost and not admitted so far."""
        return {
            "copied": self._counts["copied"],
            "given_up": self._queue.num_given_up,
            "lost": self._counts["lost"],
            "not_admitted": self._queue.num_not_admitted,
        }

    def add(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Queues the keys of one put, with the lengths of their values."""
        self._queue.add(keys, sizes)
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
        has_ended = self._copying.acquire(timeout=timeout_s)
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
        if self._is_closed or not (self._queue.num_bytes or self._to_take_back):
            return None
        if began_at < self._next_at:
            return self._next_at - began_at
        if self._is_out():
            return _PAUSE_S
        with self._copying:
            if not self._take_back():
                return _PAUSE_S
            batch = self._queue.take(BATCH_BYTES)
            if batch:
                self._copy_or_give_up(batch, began_at)
        return max(0.0, self._next_at - self._clock())

    def _copy_or_give_up(self, batch: Sequence[tuple[BlockKey, int]], began_at: float) -> None:
        """Copies the values of a batch that the lower tier lacks, and ends what `take` began.

        Those that the tier has already count for nothing in the rate, and need no admission.
        """
        if self._queue.is_new_put:
            self._is_decided = False
        num_given_up = len(batch)
        is_short = True
        is_admitted = True
        try:
            missing = _missing(self._lower, self._finder, [key for key, _ in batch])
            keys = [key for key, _ in batch if key in missing]
            sizes = [size for key, size in batch if key in missing]
            is_admitted = not keys or self._is_admitted(sizes)
            if is_admitted:
                self._next_at = began_at + sum(sizes) / self._bytes_per_s
                num_given_up, is_short = self._copy(keys, sizes)
            else:
                num_given_up = len(keys)
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

    def _copy(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> tuple[int, bool]:
        """Copies values that the lower tier lacks; returns how many of them are given up.

        The second item is True if not all were copied, whether they are given up or lost.
        """
        if not keys:
            return 0, False
        slots = self._slots(sizes)
        num_right = self._read(keys, slots)
        num_copied = self._write(keys[:num_right], slots)
        is_lost = num_copied == num_right < len(keys)
        self._counts["lost"] += is_lost
        return len(keys) - num_copied - is_lost, num_copied < len(keys)

    def _write(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Puts values into the lower tier; returns how many leading ones it took."""
        if not keys:
            return 0
        num_copied = 0
        with contextlib.suppress(StoreClosed):
            num_copied = _num_done(self._lower, self._lower.put, keys, slots)
        gone = self._gone_from_above(keys)  # a put that failed may have stored values, too
        self._to_take_back |= gone
        self._take_back()
        num_lost = len(gone.intersection(keys[:num_copied]))
        self._counts["lost"] += num_lost
        self._counts["copied"] += num_copied - num_lost
        return num_copied

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
        """Returns the keys that the first tier lacks; all, if it fails."""
        if self._finder_above is not None:
            return _missing(self._first, self._finder_above, keys)
        gone: list[BlockKey] = []
        rest = keys
        try:
            while rest:  # a match tells one missing key at a time
                num_there = count_of(self._first.match(rest), rest, self._first)
                gone += rest[num_there : num_there + 1]
                rest = rest[num_there + 1 :]
        except StoreError:
            return set(keys)
        return set(gone)

    def _read(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Reads values from the first tier; returns how many leading ones are there and right."""
        num_read = 0
        with contextlib.suppress(StoreClosed):
            num_read = _num_done(self._first, self._first.get, keys, slots)
        is_right = (self._is_right(slots.value(i)) for i in range(num_read))
        return next((i for i, right in enumerate(is_right) if not right), num_read)

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


def _num_done(
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
        return num_done_of(error, keys)
