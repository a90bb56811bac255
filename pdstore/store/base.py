"""The Store contract: what pdstore needs from anything that keeps blocks.

The count that a store returns decides which slots are verified and scattered. So `count_of` and the
functions next to it check each answer before it is used. An impossible one is the store's fault.
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
from typing import TypeGuard, TypeVar

from pdstore.errors import BadValue, StoreClosed, StoreError
from pdstore.format.keys import BlockKey

P = TypeVar("P")

MAX_KEY_CHARS = 200
FRESH_S = 1.0
"""Seconds for which a new value is not evicted, lest a long prompt evict its own first blocks."""


@dataclass(frozen=True)
class Slots:
    """Some slots of one staging buffer, in the order of their keys.

    `numbers[i]` is where the i-th value starts, in units of `slot_bytes` from the start of `view`;
    `sizes[i]` is its length: `put` stores so many bytes, and `get` must find exactly so many.
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
        """The slots from `start` up to, not including, `stop`: for work in batches."""
        return replace(self, numbers=self.numbers[start:stop], sizes=self.sizes[start:stop])

    def chosen(self, indices: Sequence[int]) -> Slots:
        """The slots at some indices, in their order."""
        numbers = [self.numbers[i] for i in indices]
        return replace(self, numbers=numbers, sizes=[self.sizes[i] for i in indices])


class Store(ABC):
    """Where KV blocks live: an immutable map from block key to the bytes of one block.

    - A key stands for one content: a put of a key that is stored succeeds and changes nothing.
    - Readers see a block whole or not at all, even after a crash of its writer.
    - Keys are given in prefix order. A result is a number n, which stands for the first n keys.
    - A miss makes the result smaller and is never an exception. A call that fails raises a
      StoreError; its `num_done` is the number of leading keys that were served before.
    - Methods block and take batches, and several threads may call them at once. An empty batch
      returns 0 and does no I/O.
    - The keys of one call are distinct. A key is 1 to 200 printable ASCII characters, none of them
      `/` and the first not `.`, so that it can be a file name. Any other key raises ValueError.
    - After a call has returned or raised, the store keeps no reference to the caller's memory and
      does not write to it.
    - How long a value lives depends on its key's kind (`pdstore.format.keys.kind_of`). In a store
      that keeps no clock, and says so in its docstring, values do not expire but are evicted. The
      pool's id and purge numbers neither expire nor are evicted (`PERMANENT`).
    - A store's constructor waits for no server, so that an engine can start before its store. If
      the store is down, its calls raise.
    - A store belongs to the process that made it: in the child of a fork calls raise StoreClosed.

    `pdstore.testing.StoreTests` has the tests of this contract. `pdstore.store.optional` has the
    calls that only some stores offer, `pdstore.store.transfer` those for a way of their own to move
    values.
    """

    label: str
    """The store's URL without secrets, for messages."""

    @property
    def lease_s(self) -> float:
        """Seconds after a match in which no put evicts the matched keys; 0: no such promise."""
        return 0.0

    @property
    def expires_blocks(self) -> bool:
        """True if the store keeps a clock: then blocks end PDSTORE_BLOCK_TTL_S after their use."""
        return False

    @abstractmethod
    def match(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading keys are stored. Leases these keys and counts a use of each."""

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Fills the i-th slot with the i-th value; returns how many leading values were stored.

        If it returns n, the slots after the first n may hold anything. Raises WrongLength at a
        value that has not exactly `slots.sizes[i]` bytes.
        """

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Stores each slot's bytes under its key unless the key is stored already.

        Returns how many leading values it took. The number does not promise that another process
        can read them: `match` tells that. Raises StoreFull when there is no room.
        """

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forgets values, leased or not, that failed verification; a missing key is no error."""

    @abstractmethod
    def clear(self, namespace: str) -> None:
        """Forgets every value of one namespace, leased or not: blocks, tails and markers.

        `namespace` is a `Namespace.hex`; any other text raises ValueError. Values of other
        namespaces, the pool's id and purge numbers stay. A value put during the call may stay or be
        forgotten. A value that is read during it may be wrong, because a store on another host may
        free its memory; the reader notices when it verifies the value. A namespace without values
        is no error. The call reads every key of the pool, so do not make it while a request waits.
        """

    def allocate(self, num_bytes: int) -> memoryview:
        """Returns zeroed, page-aligned new memory, of the kind that this store moves fastest."""
        return memoryview(mmap.mmap(-1, num_bytes))

    def why_too_long(self, num_bytes: int) -> str | None:
        """Returns why a value of `num_bytes` cannot be stored, and what to set; None if it can."""
        return None

    def codes(self) -> Mapping[str, int]:
        """Returns how often the store's library gave each error code so far, by the code's name."""
        return {}

    def optional(self, protocol: type[P]) -> P | None:
        """Returns an object that has a protocol's calls for this store; None if it lacks them.

        A wrapper or a composite decides itself what it can offer of what it consists of.
        protocol: of `pdstore.store.optional`, or `pdstore.store.transfer.MovesValues`.
        """
        return self if isinstance(self, protocol) else None

    @abstractmethod
    def close(self) -> None:
        """Closes the connections within a second. Any later call but `close` raises StoreClosed."""


class Lifecycle:
    """The life of a store: the store may be used until `end`, and never in the child of a fork."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._pid = os.getpid()
        self._refuses = False
        self._ended = False

    @property
    def is_closed(self) -> bool:
        return self._ended or self._pid != os.getpid()

    def check(self, num_done: int = 0) -> None:
        """Raises StoreClosed if the store has ended, refuses calls or belongs to the parent."""
        if self._refuses or self.is_closed:
            is_here = self._pid == os.getpid()
            why = "is closed" if is_here else "belongs to the parent process: open it again here"
            raise StoreClosed(f"{self._label} {why}", num_done=num_done)

    def enter(self, keys: Sequence[BlockKey], slots: Slots | None = None) -> None:
        """Begins a call about keys: does what `check` and `check_call` do."""
        self.check()
        check_call(keys, slots)

    def refuse(self) -> None:
        """Refuses calls from now on; the store's life has not ended before `end` is called."""
        self._refuses = True

    def end(self) -> bool:
        """Ends the store's life; returns True to the one caller that has to close its resources."""
        first = not self.is_closed
        self._ended = True
        return first


_PRINTABLE = bytes(range(32, 127))  # `translate` with these is 8 times as fast as `isprintable`


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
    text = "/" + "/".join(keys)  # one test for all: a test per key takes as long as a match does
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
    """Returns how many leading `keys` were served before `error`; 0 if the error claims too many.

    With a BadValue at most `len(keys) - 1` were served: the key that it is about was not.
    """
    most = len(keys) - isinstance(error, BadValue)
    return error.num_done if is_count(error.num_done, most) else 0


def stored_among(answers: object, keys: Sequence[BlockKey], store: Store) -> set[BlockKey]:
    """Returns those of `keys` that a store says are stored: `answers` has one bool for each key.

    Raises StoreError if `answers` has any other form.
    """
    if not isinstance(answers, Sequence) or len(answers) != len(keys):
        raise StoreError(f"{store.label}: did not answer about each of {len(keys)} keys")
    if not set(map(type, answers)) <= {bool}:
        raise StoreError(
            f"{store.label}: answered about {len(keys)} keys with more than yes and no"
        )
    return set(itertools.compress(keys, answers))


def is_count(answer: object, most: int) -> TypeGuard[int]:
    """True if `answer` is an int in 0..most; False for a bool."""
    return isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer <= most


@functools.lru_cache(maxsize=64)
def log_once(log: logging.Logger, line: str, level: int = logging.INFO) -> None:
    """Logs a line unless it is one of the last 64 different lines logged here.

    Stores use it when they open, because both halves of an instance may open the same store.
    """
    log.log(level, "%s", line)
