"""The Store contract: what pdstore needs from anything that keeps blocks.

The count that a store returns decides which slots are verified and scattered. So `count_of` and the
functions next to it check each answer before it is used: an impossible answer is the store's error.
"""

# Decisions: docs/decisions/002-put-if-absent.md, docs/decisions/025-clear.md
from __future__ import annotations

import functools
import itertools
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from pdstore.errors import BadValue, StoreClosed, StoreError
from pdstore.format.keys import BlockKey

MAX_KEY_CHARS = 200
FRESH_S = 1.0
"""Time for which a new value is not evicted: else a long prompt would evict its own beginning."""


@dataclass(frozen=True)
class Slots:
    """Some slots of one staging buffer, in the order of their keys.

    `numbers[i]` is where the i-th value starts, in units of `slot_bytes` from the start of `view`;
    `sizes[i]` is its length in bytes: what `put` stores, and exactly what `get` must find.
    """

    view: memoryview  # format "B", writable, the whole buffer
    slot_bytes: int
    numbers: Sequence[int]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def value(self, i: int) -> memoryview:
        """The bytes of the i-th value."""
        start = self.numbers[i] * self.slot_bytes
        return self.view[start : start + self.sizes[i]]

    def part(self, start: int, stop: int) -> Slots:
        """The slots start..stop of these, for working in batches."""
        return replace(self, numbers=self.numbers[start:stop], sizes=self.sizes[start:stop])


class Store(ABC):
    """Where KV blocks live: an immutable map from block key to the bytes of one block.

    - A key names a content: storing a stored key again is a success and changes nothing.
    - A block is visible whole or not at all, also after a crash of its writer.
    - Keys are given in prefix order, and every result is a number n: it means the first n keys.
    - A miss is a smaller number, never an exception. Exceptions are StoreErrors about the store
      itself; their `num_done` is the number n of the leading keys that were served before.
    - Methods block, are batched, and may be called from any thread at once. An empty batch returns
      0 and does no I/O.
    - The keys of one call are distinct. A key is 1 to 200 printable ASCII characters, none of them
      `/` and the first not `.`, so that it can be a file name. Anything else is a ValueError.
    - Once a call has returned or raised, the store keeps none of the caller's memory and writes
      no more to it.
    - The life of a value depends on its key's kind (`pdstore.format.keys.kind_of`). A store that
      keeps no clock says so in its docstring, and only evicts. The pool's id is never evicted.
    - A store's constructor does little. If the store is down, its calls raise, so that an engine
      can start before its store.
    - A store belongs to the process that made it: in the child of a fork calls raise StoreClosed.

    `pdstore.testing.StoreTests` is this contract as tests. What only some stores can do is in
    `pdstore.store.optional`.
    """

    label: str
    """The store's URL without secrets, for messages."""

    @property
    def lease_s(self) -> float:
        """Seconds for which no put evicts a matched key; 0: nothing is promised."""
        return 0.0

    @abstractmethod
    def match(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many of the first keys are stored. Leases them and counts a use of each."""

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Fills the i-th slot with the i-th value; returns how many leading values were stored.

        After the first n slots, n being the result, slots may hold anything. Raises WrongLength at
        a value that has not exactly `slots.sizes[i]` bytes.
        """

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Stores each slot's bytes under its key, if that is not stored; returns how many it took.

        The number is a hint, not durability: `match` says what another process can read. Raises
        StoreFull when there is no room.
        """

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forgets values that failed verification, leased or not; a missing key is no error."""

    @abstractmethod
    def clear(self, namespace: str) -> None:
        """Forgets every value of one namespace, leased or not: blocks, tails and markers.

        `namespace` is a `Namespace.hex`; anything else is a ValueError. Other namespaces' values
        and the pool's id stay. A value that is put meanwhile may stay or go. A value that is read
        meanwhile may be wrong, which verifying it shows: a store on another host may free memory
        under a reader. A namespace without values is no error. The call looks at every key of the
        pool, so it is not for a request's path.
        """

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns new memory that this store moves fastest, zeroed and page-aligned."""
        return memoryview(mmap.mmap(-1, num_bytes))

    def why_too_long(self, num_bytes: int) -> str | None:
        """Returns why no value of so many bytes can be stored, and what to set; None if one can."""
        return None

    def codes(self) -> Mapping[str, int]:
        """Returns how often the store's library gave each error code so far, by the code's name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Closes the connections within a second. All calls but `close` then raise StoreClosed."""


class Lifecycle:
    """The life of a store: it may be used until `end`, and never in the child of a fork."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._pid = os.getpid()
        self._refuses = False
        self._ended = False

    @property
    def is_closed(self) -> bool:
        return self._ended or self._pid != os.getpid()

    def check(self, num_done: int = 0) -> None:
        """Raises StoreClosed if the store has ended or refuses calls."""
        if self._refuses or self.is_closed:
            is_here = self._pid == os.getpid()
            why = "is closed" if is_here else "belongs to the parent process: open it again here"
            raise StoreClosed(f"{self._label} {why}", num_done=num_done)

    def refuse(self) -> None:
        """Refuses calls from now on; `end` is still to come."""
        self._refuses = True

    def end(self) -> bool:
        """Ends the life; returns True if this call, in the store's own process, has to clean up."""
        first = not self.is_closed
        self._ended = True
        return first


_PRINTABLE = bytes(range(32, 127))  # deleting these is eight times as fast as `str.isprintable`


def check_call(keys: Sequence[BlockKey], slots: Slots | None = None) -> None:
    """Checks the arguments of a call, as every store does first. Raises ValueError."""
    if len(set(keys)) != len(keys):
        raise ValueError("the keys of one call must be distinct")
    _check_names(keys)
    if slots is None:
        return
    if not len(keys) == len(slots.numbers) == len(slots.sizes):
        raise ValueError(
            f"{len(keys)} keys, {len(slots.numbers)} slots, {len(slots.sizes)} sizes: not as many"
        )
    end = len(slots.view)
    for number, size in zip(slots.numbers, slots.sizes, strict=True):
        if not (0 < size <= slots.slot_bytes and 0 <= number * slots.slot_bytes <= end - size):
            raise ValueError(f"slot {number} of {size} bytes is outside the buffer")


def _check_names(keys: Sequence[BlockKey]) -> None:
    if not keys:
        return
    text = "/" + "/".join(keys)  # all at once: a test per key costs as much as a lookup in memory
    if (
        not (text.isascii() and not text.encode().translate(None, _PRINTABLE))
        or text.count("/") != len(keys)
        or "/." in text
        or not 0 < min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_CHARS
    ):
        raise ValueError(f"bad block key among {len(keys)}, the first of them {keys[0]!r}")


def count_of(answer: object, keys: Sequence[object], store: Store) -> int:
    """Returns a store's answer about `keys` if it is an int in 0..len(keys).

    Raises StoreError for any other answer.
    """
    if is_count(answer, len(keys)):
        return answer
    first = keys[0] if keys else "no key"
    raise StoreError(f"{store.label}: answered {answer!r} about {len(keys)} keys from {first} on")


def num_done_of(error: StoreError, keys: Sequence[BlockKey]) -> int:
    """Returns how many of the first `keys` were served before `error`; 0 if it claims too many.

    The key that a BadValue is about was not served: at least this key is left.
    """
    most = len(keys) - isinstance(error, BadValue)
    return error.num_done if is_count(error.num_done, most) else 0


def stored_among(answers: object, keys: Sequence[BlockKey], store: Store) -> set[BlockKey]:
    """Returns the keys that a store says are stored; `answers` has a bool for each of them.

    Raises StoreError for anything else.
    """
    if not isinstance(answers, Sequence) or len(answers) != len(keys):
        raise StoreError(f"{store.label}: did not answer about each of {len(keys)} keys")
    if not set(map(type, answers)) <= {bool}:
        raise StoreError(
            f"{store.label}: answered about {len(keys)} keys with more than yes and no"
        )
    return set(itertools.compress(keys, answers))


def is_count(answer: object, most: int) -> TypeGuard[int]:
    """True if `answer` is an int in 0..most; a bool is no count."""
    return isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer <= most


@functools.lru_cache(maxsize=64)
def log_once(log: logging.Logger, line: str) -> None:
    """Logs a line at level INFO; does nothing if this logger has logged the same line lately.

    For lines that stores log when they open: both halves of an instance may open the same store.
    """
    log.info("%s", line)
