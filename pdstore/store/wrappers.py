"""Stores around a store: each adds one thing to any store and nothing to the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store

A = ParamSpec("A")
R = TypeVar("R")


class WrapperStore(Store):
    """Passes every call of the contract to another store.

    It offers none of the other store's optional protocols but those that a subclass lets through:
    one that changes `get` would verify other bytes. `CallWrapper` is the base for
    those that change no answer.
    """

    passes: tuple[type, ...] = ()
    """Optional protocols that a subclass lets through unchanged: those whose calls see no value."""

    added_bytes: int = 0
    """Bytes that a subclass adds to each value but the pool's id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.label = store.label

    @property
    def wrapped(self) -> Store:
        """The other store."""
        return self._store

    @property
    def lease_s(self) -> float:
        return self._store.lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self._store.match(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._store.get(keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self._store.put(keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._store.remove(keys)

    def clear(self, namespace: str) -> None:
        self._store.clear(namespace)

    def allocate(self, num_bytes: int) -> memoryview:
        return self._store.allocate(num_bytes)

    def close(self) -> None:
        self._store.close()


class CallWrapper(WrapperStore):
    """Does something around every call of another store, and changes none of its answers.

    So `find_optional` finds the other store's optional protocols through it: their calls go
    through `around` as well.
    """

    def around(self, verb: str, call: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        """Makes a call of the other store and returns its answer.

        verb: the method of `Store` that the call is a form of, for example `get` for
          `get_right`.
        args: those of the call; first the keys of a batch, if it has keys, then its slots.
        """
        return call(*args, **kwargs)

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.around("match", self._store.match, keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("get", self._store.get, keys, slots)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        return self.around("put", self._store.put, keys, slots)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.around("remove", self._store.remove, keys)

    def clear(self, namespace: str) -> None:
        self.around("clear", self._store.clear, namespace)
