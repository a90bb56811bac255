"""MemoryStore: blocks in this process's memory, for tests and for P and D in one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pdstore.errors import ConfigError, StoreFull, WrongLength
from pdstore.format.keys import NEVER_REFUSED, PERMANENT, BlockKey, Kind, kind_of, prefix_of
from pdstore.settings import Settings
from pdstore.store.base import FRESH_S, Lifecycle, Slots, Store
from pdstore.store.optional import ALL_KEYS, Room, StoredValue
from pdstore.store.url import Place, Reach, StoreURL

DEFAULT_LEASE_S = 10.0


class _Value(NamedTuple):
    data: bytes
    kept_until: float
    used_at: float


class _Shelf:
    """The values that all stores of one name share, in the order of their last matches."""

    def __init__(
        self, budget: int | None, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget = budget
        self.lease_s = lease_s
        self.clock = clock
        self.lock = threading.RLock()
        self.values: OrderedDict[BlockKey, _Value] = OrderedDict()  # read without the lock
        self.used_bytes = 0
        self.num_evicted = 0

    def add(self, key: BlockKey, data: bytes) -> bool:
        """Adds a value unless its key is stored. Returns False if there is no room for it.

        A marker is added even then: it tells a D that waits for blocks that none will come. So is a
        purge number, without which no copy may be made.
        """
        with self.lock:
            if key in self.values:
                return True
            if not self.evict_for(len(data)) and kind_of(key) not in NEVER_REFUSED:
                return False
            now = self.clock()
            self.values[key] = _Value(data, now + FRESH_S, now)
            self.used_bytes += len(data)
            return True

    def lease(self, key: BlockKey, now: float, lease_s: float | None = None) -> bool:
        """Leases a value and counts a use of it at `now`. Returns False if it is not stored."""
        with self.lock:
            value = self.values.get(key)
            if value is None:
                return False
            kept_until = now + (self.lease_s if lease_s is None else lease_s)
            self.values[key] = _Value(value.data, max(value.kept_until, kept_until), now)
            self.values.move_to_end(key)
            return True

    def drop(self, keys: Iterable[BlockKey]) -> None:
        with self.lock:
            for value in [self.values.pop(key, None) for key in keys]:
                self.used_bytes -= len(value.data) if value is not None else 0

    def drop_all(self, prefix: str) -> None:
        """Drops every value whose key begins with `prefix`."""
        with self.lock:
            self.drop([key for key in self.values if key.startswith(prefix)])

    def age_of_oldest(self, num_bytes: int) -> float | None:
        with self.lock:
            victims, _ = self._victims(num_bytes)
            return self.clock() - self.values[victims[0]].used_at if victims else None

    def evict_for(self, num_bytes: int, keep: Collection[str] = ()) -> bool:
        victims, missing = self._victims(num_bytes, keep)
        if missing > 0:
            return False
        self.drop(victims)
        self.num_evicted += len(victims)
        return True

    def _victims(self, num_bytes: int, keep: Collection[str] = ()) -> tuple[list[BlockKey], int]:
        """Returns the keys to evict for new bytes, and how many bytes then still have no room.

        keep: if not empty, all other blocks and tails may be evicted, even if they are leased.
        """
        now = self.clock()
        victims = []
        goal = 0 if self.budget is None else self.used_bytes + num_bytes - self.budget
        for key, value in self.values.items():
            if goal <= 0:
                break
            is_kept_back = kind_of(key) is Kind.HANDOFF or key in keep
            is_left = is_kept_back if keep else value.kept_until >= now
            if not is_left and kind_of(key) not in PERMANENT:
                victims.append(key)
                goal -= len(value.data)
        return victims, goal


_shelves: weakref.WeakValueDictionary[str, _Shelf] = weakref.WeakValueDictionary()
_shelves_lock = threading.Lock()


class MemoryStore(Store):
    """`memory://` opens a new store; `memory://name` opens one that all users of the name share.

    A name's values live until its last store is closed. Without a budget nothing is evicted. With a
    budget, the values matched longest ago are evicted first; leased values only by `make_room`.
    Markers are stored even if nothing may be evicted for them, beyond the budget.
    It keeps no clock: values never expire, and tails and markers are evicted like blocks.

    clock: returns seconds, by which a store without a name counts leases; simulations pass one.
    """

    def __init__(
        self,
        label: str = "memory://",
        *,
        budget: int | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self._lifecycle = Lifecycle(label)
        if label == "memory://":
            self._shelf = _Shelf(budget, lease_s, clock)
        else:
            self._shelf = _named(label, budget, lease_s)

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> MemoryStore:
        return cls(url.label, **_options_of(url))

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        _options_of(url)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        return Place(Reach.PROCESS)

    @property
    def lease_s(self) -> float:
        return self._shelf.lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        shelf = self._enter(keys)
        with shelf.lock:
            count = next((i for i, key in enumerate(keys) if key not in shelf.values), len(keys))
            now = shelf.clock()
            return sum(shelf.lease(key, now) for key in reversed(keys[:count]))

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        shelf = self._enter(keys)
        return [key in shelf.values for key in keys]

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not is_there for is_there in self.which_stored(keys)]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        shelf = self._enter(keys, slots)
        for i, key in enumerate(keys):
            value = shelf.values.get(key)
            if value is None:
                return i
            if len(value.data) != slots.sizes[i]:
                raise WrongLength(
                    f"{self.label}: {key} has {len(value.data)} bytes, not {slots.sizes[i]}",
                    num_done=i,
                )
            slots.value(i)[:] = value.data
        return len(keys)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        shelf = self._enter(keys, slots)
        for i, key in enumerate(keys):
            if key not in shelf.values and not shelf.add(key, bytes(slots.value(i))):
                raise StoreFull(
                    f"{self.label}: no room for {key} in {shelf.budget} bytes", num_done=i
                )
        return len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._enter(keys).drop(keys)

    def clear(self, namespace: str) -> None:
        self._enter([]).drop_all(prefix_of(namespace))

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        shelf = self._enter([])
        with shelf.lock:
            now = shelf.clock()
            values = list(shelf.values.items())
        for key, value in values:
            if key.startswith(prefix):
                yield StoredValue(key, len(value.data), now - value.used_at)

    def length_of(self, key: BlockKey) -> int | None:
        value = self._enter([key]).values.get(key)
        return None if value is None else len(value.data)

    def room(self) -> Room:
        shelf = self._enter([])
        policy = "the least recently used goes first" if shelf.budget else "nothing goes"
        return Room(
            "this process's memory", shelf.used_bytes, shelf.budget, shelf.num_evicted, policy
        )

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        return self._enter([]).age_of_oldest(sum(sizes))

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        shelf = self._enter(keys)
        with shelf.lock:
            missing = [s for k, s in zip(keys, sizes, strict=True) if k not in shelf.values]
            return shelf.evict_for(sum(missing), frozenset(keys))

    def use(self, keys: Sequence[BlockKey]) -> None:
        shelf = self._enter(keys)
        with shelf.lock:
            now = shelf.clock()
            for key in reversed(keys):
                shelf.lease(key, now, 0.0)

    def close(self) -> None:
        self._lifecycle.end()
        self._shelf = _Shelf(None, self._shelf.lease_s)

    def _enter(self, keys: Sequence[BlockKey], slots: Slots | None = None) -> _Shelf:
        shelf = self._shelf  # read before the check: `close` ends the life before it drops this
        self._lifecycle.enter(keys, slots)
        return shelf


def _options_of(url: StoreURL) -> dict[str, Any]:
    budget = url.size("budget", 0) or None
    lease_s = url.seconds("lease", DEFAULT_LEASE_S)
    url.finish("budget, lease")
    return {"budget": budget, "lease_s": lease_s}


def _named(name: str, budget: int | None, lease_s: float) -> _Shelf:
    """Returns a name's shelf. Raises ConfigError if the shelf has another budget or lease."""
    with _shelves_lock:
        shelf = _shelves.setdefault(name, _Shelf(budget, lease_s))
    if (shelf.budget, shelf.lease_s) != (budget, lease_s):
        raise ConfigError(
            f"{name} is open with budget={shelf.budget} and lease={shelf.lease_s:g} already"
        )
    return shelf
