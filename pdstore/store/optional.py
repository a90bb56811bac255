"""Optional protocols: what some stores offer beyond the contract; `find_optional` asks for one."""

# Decision: docs/decisions/004-store-contract.md
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from pdstore.format.keys import BlockKey
from pdstore.store.base import Store
from pdstore.store.wrappers import GuardedStore, WrapperStore


@runtime_checkable
class FindsKeys(Protocol):
    """A store that can look for many unrelated keys in one round trip.

    One call then asks for the markers of all the hand-offs that an instance waits for.
    """

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether it is stored, hits and misses in any order.

        Leases nothing and does not count as a use, where the store can look without that. The keys
        are distinct, as in every call. Raises StoreError.
        """


@runtime_checkable
class TellsChanges(Protocol):
    """A store that can say when somebody has stored something, in any process of this host.

    It may not hear of other hosts' puts: who waits for those has to look from time to time.
    """

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Blocks until something may have been stored since `seen`, at most for `timeout_s`.

        seen: the number of changes that an earlier call returned. None: returns at once, with the
          number of now.
        Returns the present number: equal to `seen` if the time was up, another one if not. It may
        change without need, but never stays the same across a completed put of this host: whoever
        takes the number first and then looks for a key misses none. From any thread. Raises
        StoreError.
        """


ALL_KEYS = "pds1:"
"""The beginning of every key of pdstore, in a store that keeps other things too."""


class StoredValue(NamedTuple):
    """A value as a listing shows it.

    num_bytes: memory or disk space that it takes; at least its length.
    age_s: seconds since it was put or matched last; None where the store does not tell.
    """

    key: BlockKey
    num_bytes: int
    age_s: float | None


@runtime_checkable
class ListsValues(Protocol):
    """A store that can list what it keeps, for people and their tools."""

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Yields each value whose key begins with `prefix`, once, in no order.

        Leases nothing and counts as no use. A value that is put or removed meanwhile may be
        missing. Looks at every key of the pool, so it is for no request's path. Raises StoreError,
        also in the middle.
        """

    def length_of(self, key: BlockKey) -> int | None:
        """Returns the exact length of a value in bytes, None if it is missing.

        May lease it or count as a use. Raises StoreError.
        """


class Room(NamedTuple):
    """The fill of a store.

    keeper: what keeps the values, for people: `redis 7.0.15`.
    capacity_bytes: None where nothing limits it, or nobody tells.
    num_evicted: values that went for want of room since the keeper's start; None if not counted.
    policy: what goes when it is full, in the keeper's words.
    num_connections: connections that the keeper takes beside those it has; None: any number.
    """

    keeper: str
    used_bytes: int | None
    capacity_bytes: int | None
    num_evicted: int | None
    policy: str
    num_connections: int | None = None


@runtime_checkable
class TellsRoom(Protocol):
    """A store that knows how full it is."""

    def room(self) -> Room:
        """Returns how full it is now. May look at every value. Raises StoreError."""


@runtime_checkable
class TellsOldest(Protocol):
    """A store that evicts what was used longest ago, and knows how long ago that is.

    `pdstore.worker.admission` decides by it whether a save may evict.
    """

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        """Returns how many seconds ago the value was used that goes first for new ones.

        sizes: of the new ones, in bytes. None if they have room without it, or nothing may go. It
        need not be exact. Leases nothing and counts as no use. Raises StoreError.
        """


P = TypeVar("P")

_VERBS: Mapping[str, str] = {
    "which_stored": "match",
    "get_right": "get",
    "start_scatter": "get",
    "put_sealed": "put",
    "fill": "put",
}
"""Calls that a `GuardedStore` is around, and the verb of `Store` that each is a form of.

All other calls of optional protocols ask the store for no value, or give something back: there is
nothing to guard or to measure.
"""


def find_optional(store: Store, protocol: type[P]) -> P | None:
    """Returns an object with the protocol's calls on this store; None if the store has none.

    For a plain store it is the store itself. For a `GuardedStore` its calls go through the guard.
    Other wrappers offer what they let through (`WrapperStore.passes`).

    protocol: one of this module, or a class of stores.
    """
    if isinstance(store, WrapperStore) and protocol in store.passes:
        return find_optional(store.wrapped, protocol)
    if not isinstance(store, GuardedStore):
        return store if isinstance(store, protocol) else None
    inner = find_optional(store.wrapped, protocol)
    return None if inner is None else cast(P, _Guarded(store, inner))


class _Guarded:
    """The optional calls of a store, with the guard around those in `_VERBS`."""

    def __init__(self, guard: GuardedStore, inner: object) -> None:
        self._guard = guard
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        verb = _VERBS.get(name)
        return found if verb is None else partial(self._guard.around, verb, found)
