"""find_optional: an optional protocol of a store, also through the wrappers around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, TypeVar

from pdstore.format.keys import BlockKey, Kind
from pdstore.native.engine import Engine
from pdstore.native.value_batch import ValueBatch
from pdstore.store.base import Slots, Store
from pdstore.store.in_place import Filled, InPlace, Loan, NativeInPlace, Reservation, Taken
from pdstore.store.optional import (
    ChecksumReader,
    ErrorCodes,
    FindsKeys,
    LimitsValues,
    ListsValues,
    NamesChanges,
    PutsAtOnce,
    SealingWriter,
    TellsAbsence,
    TellsChanges,
    TellsRoom,
    VerifyingReader,
)
from pdstore.store.wrappers import CallWrapper, WrapperStore

P = TypeVar("P")


def find_optional(store: Store, protocol: type[P]) -> P | None:
    """Returns an object with the protocol's calls on this store; None if the store has none.

    For a plain store it is the store itself. For a `CallWrapper` its calls go through the wrapper.
    Other wrappers offer what they let through (`WrapperStore.passes`).
    """
    if isinstance(store, WrapperStore) and protocol in store.passes:
        return find_optional(store.wrapped, protocol)
    if not isinstance(store, CallWrapper):
        return store if isinstance(store, protocol) else None
    inner = find_optional(store.wrapped, protocol)
    return None if inner is None else _FORWARDERS[protocol](store, inner)


class _ReaderThrough:
    def __init__(self, wrapper: CallWrapper, inner: ChecksumReader) -> None:
        self._wrapper, self._inner = wrapper, inner

    def get_with_checksums(
        self, keys: Sequence[BlockKey], slots: Slots, checksums: MutableSequence[int]
    ) -> int:
        get = self._inner.get_with_checksums
        return self._wrapper.around("get", get, keys, slots, checksums)


class _VerifierThrough:
    def __init__(self, wrapper: CallWrapper, inner: VerifyingReader) -> None:
        self._wrapper, self._inner = wrapper, inner

    def get_right(
        self, keys: Sequence[BlockKey], slots: Slots, starts: bytes, engine: Engine
    ) -> int:
        return self._wrapper.around("get", self._inner.get_right, keys, slots, starts, engine)


class _WriterThrough:
    def __init__(self, wrapper: CallWrapper, inner: SealingWriter) -> None:
        self._wrapper, self._inner = wrapper, inner

    def put_sealed(
        self, keys: Sequence[BlockKey], slots: Slots, starts: bytes, engine: Engine
    ) -> int:
        return self._wrapper.around("put", self._inner.put_sealed, keys, slots, starts, engine)


class _KeysThrough:
    def __init__(self, wrapper: CallWrapper, inner: FindsKeys) -> None:
        self._wrapper, self._inner = wrapper, inner

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._wrapper.around("match", self._inner.which_stored, keys)


class _PutsThrough:
    def __init__(self, wrapper: CallWrapper, inner: PutsAtOnce) -> None:
        self._wrapper, self._inner = wrapper, inner

    def put_at_once(self, key: BlockKey, value: bytes) -> bool:
        return self._wrapper.around("put", self._inner.put_at_once, key, value)


class _InPlaceThrough:
    def __init__(self, wrapper: CallWrapper, inner: InPlace) -> None:
        self._wrapper, self._inner = wrapper, inner
        self.memory = inner.memory
        self.abandon = inner.abandon  # what gives something back never waits at the wrapper
        self.still_there = inner.still_there
        self.release = inner.release

    @property
    def span_bytes(self) -> int:
        return self._inner.span_bytes

    def reserve(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Reservation:
        return self._wrapper.around("put", self._inner.reserve, keys, sizes)

    def publish(self, reservation: Reservation, count: int) -> int:
        return self._wrapper.around("put", self._inner.publish, reservation, count)

    def borrow(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> Loan:
        return self._wrapper.around("get", self._inner.borrow, keys, sizes)


class _NativeInPlaceThrough(_InPlaceThrough):
    def __init__(self, wrapper: CallWrapper, inner: NativeInPlace) -> None:
        super().__init__(wrapper, inner)
        self._native = inner

    def fill(
        self, kinds: Sequence[Kind], batches: Sequence[ValueBatch], rest_s: float = 0.0
    ) -> Filled:
        return self._wrapper.around("put", self._native.fill, kinds, batches, rest_s)

    def take(self, batch: ValueBatch) -> Taken | None:
        return self._wrapper.around("get", self._native.take, batch)


def _unwrapped(wrapper: CallWrapper, inner: P) -> P:
    """The calls ask the store for no value: there is nothing to guard or to measure."""
    return inner


_FORWARDERS: Mapping[type, Callable[[CallWrapper, Any], Any]] = {
    ChecksumReader: _ReaderThrough,
    ErrorCodes: _unwrapped,
    FindsKeys: _KeysThrough,
    LimitsValues: _unwrapped,
    InPlace: _InPlaceThrough,
    ListsValues: _unwrapped,
    NamesChanges: _unwrapped,
    NativeInPlace: _NativeInPlaceThrough,
    PutsAtOnce: _PutsThrough,
    SealingWriter: _WriterThrough,
    TellsAbsence: _unwrapped,
    TellsChanges: _unwrapped,
    TellsRoom: _unwrapped,
    VerifyingReader: _VerifierThrough,
}
