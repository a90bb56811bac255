"""The Store contract: what pdstore needs from anything that keeps blocks."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdstore.types import BlockKey, Slots


class Store(ABC):
    """Where KV blocks live: an immutable map from block key to the bytes of one block.

    - A key names a content: storing a stored key again is a success and changes nothing.
    - A block is visible whole or not at all, also after a crash of its writer.
    - Keys come in prefix order, and every result is a prefix: "the first n".
    - A miss is a number, never an exception. Exceptions are StoreError and are about the store;
      `num_done` in them is the n of the keys served before.
    - Methods block, are batched, and may be called from any thread at once. An empty batch is 0 and
      does no I/O.
    - The keys of one call are distinct (else ValueError). Keys are printable ASCII without `/`, at
      most 200 long.
    - The caller's memory is the caller's again when the call returns or raises: nothing is kept,
      nothing comes late.
    - How long a value stays depends on its key's kind (`pdstore.keys.kind_of`). A store without a
      clock says so and relies on its eviction; a pool key is never evicted.
    - Constructing a store does little; a store that is down raises at the calls, so that an engine
      can start first.

    `pdstore.testing.StoreTests` is this contract as tests.
    """

    label: str
    """The store's URL without secrets, for messages."""

    @property
    def lease_s(self) -> float:
        """For how many seconds a matched key is safe from eviction; 0: nothing is promised."""
        return 0.0

    @abstractmethod
    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys are stored. Those are leased, and count as used now."""

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Fills the i-th slot with the i-th value; returns how many of the first were there.

        Slots behind the returned n may hold anything. Raises WrongLength at a value that has not
        exactly `slots.sizes[i]` bytes.
        """

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Stores the i-th slot's bytes under the i-th key unless it is stored; returns how many
        were accepted.

        The number is a hint, not durability: `match` says what another process can read. Raises
        StoreFull when there is no room.
        """

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forgets these values, leased or not; a missing one is fine. Only for values that failed
        verification.
        """

    def allocate(self, num_bytes: int) -> memoryview:
        """Memory that this store moves fastest: writable, zero-filled, page-aligned, freed with its
        last view.
        """
        return memoryview(mmap.mmap(-1, num_bytes))

    @abstractmethod
    def close(self) -> None:
        """Ends the store's connections; twice is fine. Later calls raise StoreClosed."""


def check_call(keys: Sequence[BlockKey], slots: Slots | None = None) -> None:
    """The argument checks that every store makes first. Raises ValueError."""
    if len(set(keys)) != len(keys):
        raise ValueError("the keys of one call must be distinct")
    if slots is not None and not len(keys) == len(slots.numbers) == len(slots.sizes):
        raise ValueError(
            f"{len(keys)} keys go with {len(slots.numbers)} slots and {len(slots.sizes)} sizes"
        )
    for i in range(0 if slots is None else len(slots)):
        assert slots is not None
        start, size = slots.numbers[i] * slots.slot_bytes, slots.sizes[i]
        if not (0 < size <= slots.slot_bytes and start >= 0 and start + size <= len(slots.view)):
            raise ValueError(f"slot {slots.numbers[i]} of {size} bytes is outside the buffer")
