"""CopyQueue: the keys of values that wait to be copied to a lower tier."""

# Decision: docs/decisions/048-write-behind.md
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from pdstore.format.keys import BlockKey

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
        self._batch: dict[BlockKey, int] = {}  # those keys, unless they were dropped meanwhile
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
            self._keep_bound()

    def take(self, most_bytes: int) -> list[tuple[BlockKey, int]]:
        """Takes leading keys of the oldest put, whose values fit `most_bytes` in equal slots.

        Takes one key that alone is larger. `end` must follow, unless the result is empty, and
        `put_back` may come before it.
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
            self._batch = dict(taken)
            self.is_new_put = put is not self._last
            self._last = put
        return taken

    def put_back(self, keys: Sequence[BlockKey]) -> None:
        """Makes keys that `take` took wait again, in front of all others and in their order."""
        with self._changed:
            put = self._taken or _Put()
            again = [key for key in keys if key in self._batch and key not in self._waiting]
            put.extendleft((key, self._batch[key]) for key in reversed(again))
            if not self._puts or self._puts[0] is not put:  # it was empty, and was left out
                self._puts.appendleft(put)
            self._waiting.update(again)
            self.num_bytes += sum(self._batch[key] for key in again)
            self._keep_bound()

    def end(self, num_given_up: int, *, is_short: bool = False, is_admitted: bool = True) -> None:
        """Ends what `take` began. If values were given up, so is what waits behind them.

        is_short: True if what waits behind is given up in any case, as behind a lost value.
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
            self._batch = {}
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
            for key in [key for key in self._batch if is_dropped(key)]:
                del self._batch[key]
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no key waits and no copy is under way; returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._taken is None, timeout_s
            )

    def _keep_bound(self) -> None:
        while self.num_bytes > self._most_bytes:
            self._skip_empty()
            self._forget(*self._puts[0].pop())
            self.num_given_up += 1

    def _forget(self, key: BlockKey, size: int) -> None:
        self._waiting.discard(key)
        self.num_bytes -= size

    def _skip_empty(self) -> None:
        while self._puts and not self._puts[0]:
            self._puts.popleft()
