"""Optional protocols: what some stores offer beyond the contract; `Store.optional` finds one."""

# Decision: docs/decisions/004-store-contract.md
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.metrics import Metrics, TierState
from pdstore.store.admission import Admission
from pdstore.store.base import Slots, Store


@runtime_checkable
class FindsKeys(Protocol):
    """A store that can search for many unrelated keys in one round trip.

    With it, one call can search for the markers of all hand-offs that an instance waits for.
    """

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether it is stored, also for the keys after a miss.

        The store should lease nothing and count no use, if it can search in that way. The keys are
        distinct, as in every call. Raises StoreError.
        """


@runtime_checkable
class TellsRemovals(Protocol):
    """A store that can be asked at any time which values are gone, whoever has removed them.

    With it, an instance tells routers what they can no longer find in the pool.
    """

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key whether it is not stored now.

        Leases nothing and counts no use, so values that are asked about are evicted as if they
        were not. The keys are distinct. Raises StoreError.
        """


@runtime_checkable
class TellsChanges(Protocol):
    """A store that can say when somebody has stored something, in any process of this host.

    It may not notice puts on other hosts: to wait for such a put, also match from time to time.
    """

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Blocks until the store's number of changes differs from `seen`, at most for `timeout_s`.

        seen: the number that an earlier call returned. With None, the call returns at once.
        Returns the present number: `seen` after the timeout, else another number. The
        number may change without a put, but each completed put of this host changes it. So a caller
        that takes the number before it searches for a key misses no put. Any thread may call it.
        Raises StoreError.
        """


ALL_KEYS = "pds1:"
"""The first characters of each of pdstore's keys; a store may keep values of other users too."""


class StoredValue(NamedTuple):
    """A value as a listing shows it.

    num_bytes: memory or disk space that the value takes; at least its length.
    age_s: seconds since the value was last put or matched; None if the store does not tell.
    """

    key: BlockKey
    num_bytes: int
    age_s: float | None


@runtime_checkable
class ListsValues(Protocol):
    """A store that can list its values, for people and their tools."""

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        """Yields each value whose key begins with `prefix`, a single time, in no order.

        Leases nothing and counts no use. May leave out values that are put or removed during it.
        Reads every key of the pool, so do not call it while a request waits. Raises StoreError,
        sometimes after it has yielded values.
        """

    def length_of(self, key: BlockKey) -> int | None:
        """Returns the exact length of a value in bytes, None if it is missing.

        The store may lease the value and count a use of it. Raises StoreError.
        """


class Room(NamedTuple):
    """The used and the free room of a store.

    keeper: the program or place that keeps the values, for people to read: `redis 7.0.15`.
    capacity_bytes: None if the store has no limit, or if the keeper does not tell it.
    num_evicted: values evicted since the keeper's start to make room; None if not counted.
    policy: which values are evicted when the store is full, as the keeper names it.
    num_connections: how many more connections the keeper accepts; None means any number.
    problem: why other instances cannot find what is stored here, with what to do; None if they can.
    """

    keeper: str
    used_bytes: int | None
    capacity_bytes: int | None
    num_evicted: int | None
    policy: str
    num_connections: int | None = None
    problem: str | None = None


@runtime_checkable
class TellsRoom(Protocol):
    """A store that knows how full it is."""

    def room(self) -> Room:
        """Returns how full the store is now. May read every key. Raises StoreError."""


class ServerDoubt(NamedTuple):
    """Something about a store's server that should be changed.

    subject: one or two words. remedy: tells the user what to do.
    is_wrong: True if the pool cannot work so; False if it works worse than it could.
    """

    subject: str
    said: str
    remedy: str
    is_wrong: bool = False


@runtime_checkable
class DoubtsServer(Protocol):
    """A store that can find out which settings of its server do not suit a pool."""

    def server_doubts(self) -> Iterator[ServerDoubt]:
        """Yields what should be changed at the server. It makes connections. Raises StoreError."""


@runtime_checkable
class TellsOrigins(Protocol):
    """A store that may be described elsewhere than in its URL, as in others' variables."""

    @property
    def origins(self) -> str:
        """Text for a line: the store's values, each with where it comes from; no secret."""


@runtime_checkable
class EvictsByUse(Protocol):
    """A store that evicts the values used longest ago. It tells their age, and evicts when asked.

    `pdstore.worker.save` decides by that age whether a save may evict values. After a save it
    counts a use of its blocks, and after a prompt's last save of the whole prompt, so that no block
    is evicted before those behind it. A store that lacks one of the calls is asked for none.
    """

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        """Returns how many seconds ago the value was used that new values would evict first.

        sizes: bytes of each new value. Returns None if the new values have room, or if nothing may
        be evicted. The result need not be exact. Leases nothing, counts no use. Raises StoreError.
        """

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        """Evicts values, even leased ones, until new values have room; returns whether they have.

        Evicts only blocks and tails, those used longest ago first, no more than needed, and none of
        `keys`. Other saves may take the room. Raises StoreError.
        """

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Counts a use of those keys that are stored, of the last key first: it is evicted first.

        Ends no lease, and should begin none. May end at the first missing key. Raises StoreError.
        """


@runtime_checkable
class RenewsUnread(Protocol):
    """A store that knows which values have been read since they were stored."""

    def renew(self, keys: Sequence[BlockKey], first: int, since: float) -> int:
        """Matches keys, and leases them again, except values of a prompt's saves that were read.

        first, since: the index of the first key that they stored, and when they began (monotonic).
        """


@runtime_checkable
class PeeksValues(Protocol):
    """A store whose `get` ends the leases of what it reads, and that can read without that."""

    def peek(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """Does what `Store.get` does, but ends no lease: whoever waits for a value reads it yet."""


@runtime_checkable
class HasTiers(Protocol):
    """A store that consists of several stores, one below the other."""

    @property
    def tiers(self) -> Sequence[Store]:
        """The stores, the fastest first; hand-offs meet in the first."""


@runtime_checkable
class TellsTiers(Protocol):
    """A store that consists of several tiers, and tells in which of them it has found a value."""

    def which_tier(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier where this process has found it last.

        0 is the first tier, and the answer for a key that was found nowhere. Does no I/O.
        """

    def promoted_from(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier from which this process promoted it last.

        0 is the answer for a key that it has not promoted, or has found below again since.
        """


@runtime_checkable
class TakesAdmission(Protocol):
    """A store of several tiers, which decides itself what is copied from one to another."""

    def use_admission(self, admission: Admission) -> Admission:
        """Lets an admission decide from now on; without one, all is copied that has room.

        Returns the one that decides: that of the first call, so that several pools over one store
        learn together.
        """


@runtime_checkable
class Promotes(Protocol):
    """A store whose fastest tier can take the values that a load has found in a slower one."""

    def promote(
        self,
        keys: Sequence[BlockKey],
        slots: Slots,
        put: Callable[[Sequence[BlockKey], Slots], int] | None = None,
    ) -> None:
        """Puts values that were found below into the first tier, if it is worth it.

        Changes nothing for other values, and evicts nothing by force. Raises StoreError.
        slots: verified values.
        put: puts values into the first tier, for a wrapper that changes them; None: as they are.
        """


@runtime_checkable
class OpensTiers(Protocol):
    """A store of several tiers, each of which can be read and rid of wrong values by itself."""

    def tier_stores(self) -> Sequence[Store]:
        """Returns a store for each tier, the fastest first, for `get` and `remove` alone.

        A lower tier that fails has nothing: its store raises only what tells of a wrong value.
        """


@runtime_checkable
class TellsReads(Protocol):
    """A store that consists of several tiers, and tells from which of them it has read a value."""

    def which_read(self, keys: Sequence[BlockKey]) -> list[int]:
        """Returns for each key the number of the tier from which this process has read it last.

        0 is the first tier, and the answer for a key that was not read lately. Does no I/O.
        """


@runtime_checkable
class FindsAgain(Protocol):
    """A store of several tiers that renews leases where it gave them, and searches no further.

    What a lower tier may have got meanwhile is not looked for.
    """

    @property
    def shortest_lease_s(self) -> float:
        """Seconds of the shortest lease that a tier gives; 0 if no tier gives any."""

    def match_again(self, keys: Sequence[BlockKey]) -> int:
        """Does what `Store.match` does, but asks a lower tier only for what was found there last.

        The first tier is asked for every key. Raises StoreError.
        """

    def which_again(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns for each key if the first tier has it, or a lower tier had it when asked last.

        Leases nothing and asks no lower tier; `match_again` tells what is still there. Raises
        StoreError.
        """


@runtime_checkable
class ShowsTiers(Protocol):
    """A store that consists of several tiers, and tells about each of them to metrics and pages."""

    def tier_states(self) -> Sequence[TierState]:
        """Returns the present state of each tier, the fastest first.

        Does I/O, within a lower tier's limit for a look, only while a purge forbids copies.
        """

    def tier_names(self) -> Sequence[str]:
        """Returns the name of each tier, by `tier_name`. Does no I/O."""

    def tier_rooms(self) -> Mapping[str, TellsRoom]:
        """Returns what tells the room of each tier, by the tier's name; of those that tell it."""

    def count_calls(self, metrics: Metrics) -> None:
        """Counts all later calls of lower tiers in these metrics."""


@runtime_checkable
class MeetsInTier(Protocol):
    """A store in one tier of which hand-offs meet: all that P hands over is there, and whole."""

    def meeting_store(self) -> Store:
        """Returns the store of that tier, for calls that search or read it alone."""


def meeting_store_of(store: Store) -> Store:
    """Returns the store where hand-offs meet: the first of several tiers, or the store itself."""
    meets = store.optional(MeetsInTier)
    return meets.meeting_store() if meets is not None else store


def tier_names(store: Store) -> list[str]:
    """Returns a name for each tier, its number and its URL's scheme; none if there are no tiers.

    The second of several tiers is `1 file`, for instance. A name has no secret.
    """
    shows = store.optional(ShowsTiers)
    return list(shows.tier_names()) if shows is not None else []


def tier_name(number: int, store: Store) -> str:
    """Returns a tier's number and the scheme of its URL, without any secret: `1 file`."""
    scheme, mark, _ = store.label.partition("://")
    return f"{number} {scheme if mark else 'store'}"


def tier_states_of(store: Store) -> Sequence[TierState]:
    """Returns the state of each tier of a store, the fastest first; nothing if it has no tiers."""
    shows = store.optional(ShowsTiers)
    return shows.tier_states() if shows is not None else []


def tiers_of(store: Store) -> Sequence[Store]:
    """Returns the tiers of a store, the fastest first; the store alone if it has no tiers."""
    teller = store.optional(HasTiers)
    return teller.tiers if teller is not None else [store]


def num_evicted(store: Store) -> int | None:
    """Returns how many values the store's keeper evicted since its start; None if not known."""
    teller = store.optional(TellsRoom)
    with contextlib.suppress(StoreError):
        return teller.room().num_evicted if teller is not None else None
    return None
