"""Optional protocols: what some stores offer beyond the contract; `find_optional` finds one."""

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

    So one call can ask for the markers of all hand-offs that an instance waits for.
    """

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether it is stored, hits and misses in any order.

        Leases nothing and does not count as a use, if the store can look without both. The keys are
        distinct, as in every call. Raises StoreError.
        """


@runtime_checkable
class TellsChanges(Protocol):
    """A store that can say when somebody has stored something, in any process of this host.

    It may not hear of puts on other hosts: to wait for such a put, look from time to time as well.
    """

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Blocks until something may have been stored since `seen`, at most for `timeout_s`.

        seen: the number of changes that an earlier call returned. None returns the present number
          at once.
        Returns the present number: `seen` if the time was up, else another number. The number may
        change without a put, but a completed put of this host always changes it: so a caller that
        first takes the number and then looks for a key misses no put. Any thread may call it.
        Raises StoreError.
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
        missing. Looks at every key of the pool, so it is not for a request's path. Raises
        StoreError, also after some values.
        """

    def length_of(self, key: BlockKey) -> int | None:
        """Returns the exact length of a value in bytes, None if it is missing.

        May lease it or count as a use. Raises StoreError.
        """


class Room(NamedTuple):
    """The used and the free room of a store.

    keeper: what keeps the values, for people: `redis 7.0.15`.
    capacity_bytes: None if nothing limits the store, or if its keeper does not tell.
    num_evicted: values evicted for want of room since the keeper's start; None if not counted.
    policy: what is evicted when the store is full, in the keeper's words.
    num_connections: how many more connections the keeper accepts; None means any number.
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
class EvictsByUse(Protocol):
    """A store that evicts what was used longest ago: says how long ago, and makes room when asked.

    `pdstore.worker.save` decides by the age whether a save may evict.
    """

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        """Returns how many seconds ago the value was used that goes first for new ones.

        sizes: of the new ones, in bytes. None if they have room without it, or nothing may go. It
        need not be exact. Leases nothing and counts as no use. Raises StoreError.
        """

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        """Evicts, also what is leased, until these values have room; returns whether they do.

        Only blocks and tails go: what was used longest ago, no more than must, and none of `keys`.
        Another saver may still take the room. Raises StoreError.
        """


P = TypeVar("P")

_VERBS: Mapping[str, str] = {
    "which_stored": "match",
    "get_right": "get",
    "start_scatter": "get",
    "put_sealed": "put",
    "fill": "put",
}
"""Optional calls that `GuardedStore` guards, each with the method of `Store` that it is a form of.

Other optional calls look up no key and move no value: there is nothing to guard or to measure.
"""


def find_optional(store: Store, protocol: type[P]) -> P | None:
    """Returns an object with the protocol's calls on this store; None if the store has none.

    For a plain store it is the store itself. For a `GuardedStore` the object's calls go through the
    guard. Any other wrapper offers only the protocols in its `passes`.

    protocol: a protocol of this module, or a class of stores.
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
