"""InPlace: the optional contract of a store whose memory this process can map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from pdstore.format.keys import BlockKey, Kind
from pdstore.native.engine import Ticket
from pdstore.native.value_batch import ValueBatch


@dataclass(frozen=True)
class Places:
    """Where some values lie in a store's memory.

    view: the store's whole memory, `InPlace.memory()`.
    offsets: `offsets[i]` is where the i-th value starts, in bytes from the start of `view`; a
      multiple of 4096.
    sizes: `sizes[i]` is the i-th value's length in bytes.
    """

    view: memoryview  # format "B", writable
    offsets: Sequence[int]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.offsets)

    def value(self, i: int) -> memoryview:
        """The bytes of the i-th value, where they lie."""
        start = self.offsets[i]
        return self.view[start : start + self.sizes[i]]


@dataclass(frozen=True)
class Reservation:
    """Room in a store's memory for the values that a `reserve` did not find stored.

    num_keys: how many of the call's first keys are covered: stored already, or with a place here.
    missing: the indices, in the call's keys and ascending, of the keys that have a place. They
      may be none: then all covered keys are stored.
    places: `places.value(i)` is the room for the key at index `missing[i]`.

    A store may return a subclass that carries what it needs itself.
    """

    num_keys: int
    missing: Sequence[int]
    places: Places

    def __len__(self) -> int:
        """Number of places."""
        return len(self.missing)


@dataclass(frozen=True)
class Loan:
    """The first values of a `borrow`, where they lie. They are read-only by agreement.

    A store may return a subclass that carries what it needs itself.
    """

    places: Places

    def __len__(self) -> int:
        """Number of the call's first keys that were found."""
        return len(self.places)


@runtime_checkable
class InPlace(Protocol):
    """A store whose memory this process maps: a GPU copies to and from the very bytes it keeps.

    To save: `reserve`, gather into the places, seal them there, `publish`, and `abandon` at the
    end. To load: `borrow`, verify where the bytes lie, scatter from there, and after the copies
    have ended `still_there`; `release` at the end.

        reservation = store.reserve(keys, sizes)
        try:
            ...  # write every places.value(i)
            store.publish(reservation, len(reservation))
        finally:
            store.abandon(reservation)

    - These calls and those of `Store` see the same set of values: what is published
      here is found by `match` and `get`, and what was `put` can be borrowed.
    - No lock is held while bytes move. So a borrowed value may be evicted or removed under its
      reader, and its memory be filled with another value. That is why bytes are verified where
      they lie, and why only those count that `still_there` confirms after the copy.
    - A process that is killed between any two instructions leaves misses and nothing else: its
      unpublished places are found and used again by others.
    - Methods may be called from any thread at once, but those of one reservation or loan from one
      thread at a time. They raise ValueError, StoreError and StoreClosed as `Store` does.
    - Whoever holds a reservation or a loan gives it back before the store is closed, and only when
      no device copies to or from its memory any more: `close` unmaps that memory as soon as no
      view of it is left.
    """

    @property
    def span_bytes(self) -> int:
        """The size of the pieces in which the memory may be registered with a device.

        The pieces lie side by side from the start of the memory, the last may be shorter, and no
        value lies in two of them. A multiple of 4096.
        """

    def memory(self) -> memoryview:
        """The memory that all values lie in: page-aligned, the same one at every call.

        Raises StoreError if the store cannot be reached now, and a later call may succeed.
        """

    def reserve(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Reservation:
        """Gives room for the i-th value of `sizes[i]` bytes, unless its key is stored.

        Evicts as `put` does. Where there is room for the first keys alone, the reservation covers
        those; raises StoreFull if the first key that is not stored gets none. Places hold
        arbitrary bytes, are nobody else's, and nobody finds them before `publish`.
        """

    def publish(self, reservation: Reservation, count: int) -> int:
        """Makes the first `count` places visible under their keys, whole, all bytes written.

        A key that was stored meanwhile keeps its value, and its place here goes back: that is a
        success too. Returns how many of the first places are visible now; fewer than `count` only
        where the store lost the reservation. May be called again with a larger count, so that the
        first values can be read while the last are still written.
        """

    def abandon(self, reservation: Reservation) -> None:
        """Gives back the places that are not published. Twice is fine.

        No device may write to them any more.
        """

    def borrow(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Loan:
        """Finds the values of the first keys that are stored; a lease begins, as by `match`.

        Raises WrongLength at a value that has not exactly `sizes[i]` bytes; its `num_done` says
        how many keys come before it, and those can be borrowed by another call.
        """

    def still_there(self, loan: Loan) -> int:
        """Returns how many of the loan's first values have lain in place ever since the `borrow`.

        What was copied from those, and verified before, is right. Call it when no copy from the
        memory is on its way any more.
        """

    def release(self, loan: Loan) -> None:
        """Ends a loan. Twice is fine. The lease may last longer."""

    def put_at_once(self, key: BlockKey, value: bytes) -> bool:
        """Stores a value of at most 4096 bytes as `Store.put` does, before another thread wakes.

        Never blocks: returns False, and has stored nothing, if somebody is in the way. Raises
        StoreError.
        """


class Filled(NamedTuple):
    """The values that `NativeInPlace.fill` has stored, by index, and their bytes.

    is_whole: all values are stored now, these or before; else the first batches or none.
    """

    indices: Sequence[int]
    num_bytes: int
    is_whole: bool


class Taken(NamedTuple):
    """The values that `NativeInPlace.take` has found, and the copies of them that are under way."""

    loan: Loan
    copies: Ticket


@runtime_checkable
class NativeInPlace(InPlace, Protocol):
    """An in-place store of libpdstore, which reserves, copies, sums and compares in one call.

    Python's lock is free for all of that time. Where a call does not do all, its caller goes the
    way of `InPlace` to find out why.
    """

    def fill(
        self, kinds: Sequence[Kind], batches: Sequence[ValueBatch], rest_s: float = 0.0
    ) -> Filled:
        """Reserves places as `reserve` does, gathers into them, seals and publishes.

        kinds: of all batches' keys.
        batches: at least one. Each is published when its copies have ended, in the order given.
        rest_s: time to sleep at the end.

        Raises LayoutError or SwapError if the copies fail.
        """

    def take(self, batch: ValueBatch) -> Taken | None:
        """Borrows values as `borrow` does and starts to scatter them: all, or none.

        None also if any value is missing or seen to be wrong. Others are summed after their copy:
        the caller waits for the copies and then asks their `num_right`, and `still_there`. Raises
        LayoutError or SwapError if the copies cannot begin.
        """
