"""open_store: opens a store by its URL; the store is pdstore's own or comes with another package.

An entry point of the group `pdstore.stores` names a class with `open(url, settings)`. `open` takes
the options that it knows from the StoreURL, refuses all others by `url.finish`, and returns a store
that is not connected yet. The class may also have `check(url, settings)`, which an engine calls
before it starts. `check` raises ConfigError for a URL that `open` would refuse; it makes no file,
no connection and no log line. `place(url, settings)` returns a `pdstore.store.url.Place`.

connect_store: opens the store at PDSTORE_STORE for an engine; adds encryption, breaker and metrics.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from operator import methodcaller
from typing import NamedTuple

from pdstore.errors import BadValue, ConfigError, MissingExtra, StoreError
from pdstore.format import block
from pdstore.format.keys import HASH_BYTES, POOL_ID_KEY, BlockKey
from pdstore.metrics import Metrics, Shown, is_first_tier
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.store.guard import OPEN_S, GuardedStore, guard_of
from pdstore.store.optional import Room, ShowsTiers, TellsRoom
from pdstore.store.seal import read_seal_keys, seal_store
from pdstore.store.url import Place, StoreURL
from pdstore.threads import Deadline, Ticker

GROUP = "pdstore.stores"
"""The entry-point group in which a package names its stores: `scheme = "module:Class"`."""

_REDIS = "pdstore.store.redis.store:RedisStore"
_OWN = {
    "memory": "pdstore.store.memory:MemoryStore",
    "file": "pdstore.store.file.store:FileStore",
    **{
        scheme: _REDIS
        for name, secure in (("redis", "rediss"), ("valkey", "valkeys"))
        for scheme in (
            *(name, secure, f"{name}+unix", f"{name}+cluster", f"{secure}+cluster"),
            *(f"{name}+sentinel", f"{secure}+sentinel"),
        )
    },
    "mooncake": "pdstore.store.mooncake.store:MooncakeStore",
    "shm": "pdstore.store.arena.store:ArenaStore",
}
_FAULTY = "pdstore.testing.faulty:Faulty"  # wraps the store that the rest of the URL names
_TIERED = "pdstore.store.tiers.store:TieredStore"  # for several URLs
_EXTRAS = {_REDIS: "redis", _OWN["mooncake"]: "mooncake", _FAULTY: "test"}
"""The extra of pdstore that installs the library of a store, by the store's class."""


def open_store(url: str, settings: Settings) -> Store:
    """Opens the store at a URL; most stores connect at their first call.

    url: also several URLs, separated by blanks: each is a tier of one store, the fastest first.
    Raises ConfigError for a bad URL, an unknown scheme or a package whose store cannot be loaded;
    MissingExtra, with the command that installs it, if a package is missing.
    """
    entry, parsed = _entry_for(url)
    store = methodcaller("open", parsed, settings)(_load(entry))
    if isinstance(store, Store):
        return store
    raise ConfigError(f"{_place(entry)} opened {type(store).__name__}, which is no pdstore.Store")


def check_url(url: str, settings: Settings) -> None:
    """Raises the errors of `open_store` that can be known without opening the store."""
    entry, parsed = _entry_for(url)
    found = _load(entry)
    if "check" in vars(found):  # an inherited `check` is for another class's options
        methodcaller("check", parsed, settings)(found)


def place_of(url: str, settings: Settings) -> Place:
    """Returns where the store at a URL keeps its values; opens nothing. Raises ConfigError."""
    entry, parsed = _entry_for(url)
    place = getattr(_load(entry), "place", None)
    found = place(parsed, settings) if callable(place) else Place()
    return found if isinstance(found, Place) else Place()


def _entry_for(url: str) -> tuple[EntryPoint, StoreURL]:
    """Returns the entry point for a URL's scheme, and the parsed URL. Raises ConfigError."""
    parsed = StoreURL.of(url)
    scheme = parsed.scheme
    if parsed.tiers:
        return EntryPoint("several URLs", _TIERED, GROUP), parsed
    own = _FAULTY if scheme.startswith("faulty+") else _OWN.get(scheme)
    entries = [EntryPoint(scheme, own, GROUP)] if own else []
    others = _installed(tuple(sys.path))
    entries += [entry for entry in others if entry.name == scheme]
    if not entries:
        known = [*_OWN, *sorted({entry.name for entry in others} - set(_OWN))]
        shown = ", ".join(f"{name}://" for name in known if "+" not in name)
        raise ConfigError(
            f"bad store URL {parsed.label!r}: {_hint(parsed.label, known)}it must start with one of"
            f" {shown} (redis and valkey also with +unix, +cluster or +sentinel, as"
            " redis+cluster://), or with the scheme of another package's store; no package that is"
            " installed here has this one"
        )
    if len(entries) > 1:
        owners = " and by ".join(map(_owner, entries))
        raise ConfigError(f"{scheme}:// is claimed by {owners}: uninstall all but one")
    return entries[0], parsed


@functools.cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Returns the stores of packages on this `sys.path`; to read all their files takes 20 ms."""
    return tuple(entry_points(group=GROUP))


def _hint(url: str, known: Sequence[str]) -> str:
    """Returns a guess at what a URL of unknown scheme means; an empty text if it has no guess."""
    path = url.removeprefix("file:")
    if path.startswith("/"):
        return f"did you mean file://{path}? "
    near = difflib.get_close_matches(url.partition("://")[0], known, n=1)
    return f"did you mean {near[0]}://? " if near else ""


def _load(entry: EntryPoint) -> object:
    """Imports an entry point's object. Raises ConfigError; MissingExtra for a missing package."""
    try:
        found: object = entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        if entry.dist is not None:
            raise ConfigError(f"{_place(entry)} cannot be loaded: {error}") from error
        if entry.value not in _EXTRAS or not isinstance(error, ImportError):
            raise
        raise MissingExtra(
            f"{entry.name}:// needs a package that is not installed ({error.name}): "
            f"pip install 'pdstore[{_EXTRAS[entry.value]}]'"
        ) from error
    if not callable(getattr(found, "open", None)):
        raise ConfigError(f"{_place(entry)} has no method `open(url, settings)`")
    return found


def _place(entry: EntryPoint) -> str:
    return f"{entry.value!r} of {_owner(entry)}, which serves {entry.name}://,"


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "pdstore itself"


log = logging.getLogger(__name__)


def check_store(settings: Settings) -> None:
    """Checks the settings of `connect_store` and raises the same ConfigError; opens no store.

    An engine calls it at its start, because it connects only after its model is loaded.
    """
    check_url(settings.store, settings)
    if settings.seal_key_file is not None:
        read_seal_keys(settings.seal_key_file)


def connect_store(settings: Settings, metrics: Metrics, *, open_s: float = OPEN_S) -> Store:
    """Opens the store at PDSTORE_STORE. If a required store does not answer, raises, else warns.

    open_s: the seconds for which the breaker stays open.
    Raises ConfigError for a bad URL, a bad seal key file or a missing package; StoreError if the
    store is required and does not answer.
    """
    with contextlib.ExitStack() as undo:
        opened = open_store(settings.store, settings)
        undo.callback(opened.close)
        if (shows := opened.optional(ShowsTiers)) is not None:
            shows.count_calls(metrics)
        store = GuardedStore(seal_store(opened, settings), metrics, open_s=open_s)
        undo.callback(store.close)
        try:
            store.match([POOL_ID_KEY])
        except StoreError as error:
            if settings.require_store:
                raise
            _warn_once(f"serving without the pool until it appears: {error}")
        undo.pop_all()
    metrics.add_breaker(lambda: store.is_open)
    metrics.add_codes(store.codes)
    if shows is not None:
        metrics.add_tiers(shows.tier_states)
    return store


_WARNING_INTERVAL_S = 60.0
_DAY_S = 86_400.0
warned: dict[str, Deadline] = {}
"""Times until which a message is not logged again: scheduler and worker may be in one process."""


def _warn_once(message: str, interval_s: float = _WARNING_INTERVAL_S) -> None:
    """Logs a warning, unless the other half of this instance has just logged the same."""
    if message not in warned or warned[message].is_over():
        warned[message] = Deadline(interval_s)
        log.warning(message)


def read_pool_id(store: Store) -> bytes:
    """Returns the random id of this pool; gives the pool an id if it has none.

    Raises StoreError, also if the pool does not keep the new id.
    """
    slots = Slots(store.allocate(4096), 4096, [0], [block.HEADER_BYTES])
    for _ in range(3):  # a value that does not verify is removed and written again
        is_there, header = _read_header(store, POOL_ID_KEY, slots)
        if header is not None:
            return header.prefix_hash
        if is_there:
            store.remove([POOL_ID_KEY])
        mine = secrets.token_bytes(HASH_BYTES)
        header = block.Header(block.FLAG_MARKER, 0, 0, 1, 0, 0, bytes(HASH_BYTES), mine)
        block.seal(slots.value(0), header)
        store.put([POOL_ID_KEY], slots)
    raise StoreError(f"{store.label} does not keep the pool's id")


def read_marker(store: Store, key: BlockKey) -> block.Header | None:
    """Returns the header stored under a marker's key; None if it is missing or damaged.

    Raises StoreError.
    """
    slots = Slots(store.allocate(4096), 4096, [0], [block.HEADER_BYTES])
    return _read_header(store, key, slots)[1]


def _read_header(store: Store, key: BlockKey, slots: Slots) -> tuple[bool, block.Header | None]:
    """Returns whether a value is stored, and its header, or None if the value is wrong."""
    try:
        is_there = store.get([key], slots) == 1
    except BadValue:  # of another length: after a power failure a file may be empty
        return True, None
    return is_there, block.read_header(slots.value(0)) if is_there else None


_IDLE_FACTOR = 50
"""A store is left alone for at least so many times the seconds that its last `room` took.

So `room`, which may read every key of a large pool, keeps the store busy for at most 2 % of the
time (1 / 51). A `room` of 0.3 s is the longest that is still called at each interval of 15 s.
"""


class _RoomMetrics(NamedTuple):
    """The metrics of one room: gauges and a counter."""

    used: Shown
    capacity: Shown
    evictions: Shown

    def show(self, room: Room, num_new_evictions: int) -> None:
        self.used.set(room.used_bytes or 0)
        self.capacity.set(room.capacity_bytes or 0)
        self.evictions.inc(num_new_evictions)


class _RoomSource:
    """A store that tells its room, and the metrics that show it."""

    def __init__(self, store: TellsRoom, metrics: Sequence[_RoomMetrics]) -> None:
        self._store = store
        self._metrics = metrics
        self._num_evicted: int | None = None

    def read(self) -> Room:
        """Asks the store for its room, and sets the metrics. Raises StoreError."""
        room = self._store.room()
        now = room.num_evicted
        before = now if self._num_evicted is None else self._num_evicted
        num_new = 0 if now is None or before is None else max(0, now - before)
        for each in self._metrics:
            each.show(room, num_new)
        self._num_evicted = before if now is None else now
        return room


class RoomWatch:
    """Asks a store for its room every `interval_s`, on a thread of its own; sets the metrics.

    So it does with each lower tier, on one more thread for each, because a tier may hang.
    If `room` takes long, the thread asks less often: see `_IDLE_FACTOR`.
    A store that cannot tell its room gets no thread. After an error the metrics keep their numbers.
    It also keeps `GuardedStore.lasting_problem` up to date, and logs such a problem once.
    """

    def __init__(self, store: Store, metrics: Metrics, interval_s: float = 15.0) -> None:
        self._guard = guard_of(store)
        self._interval_s = interval_s
        shown = [
            _RoomMetrics(
                metrics.store_used_bytes, metrics.store_capacity_bytes, metrics.store_evictions
            )
        ]
        below: list[_RoomSource] = []
        shows = store.optional(ShowsTiers)
        for name, tells in shows.tier_rooms().items() if shows is not None else ():
            of_tier = _RoomMetrics(
                metrics.tier_used_bytes.labels(name),
                metrics.tier_capacity_bytes.labels(name),
                metrics.tier_evictions.labels(name),
            )
            if is_first_tier(name):  # the whole store tells the room of its first tier
                shown.append(of_tier)
            else:
                below.append(_RoomSource(tells, [of_tier]))
        whole = store.optional(TellsRoom)
        turns = [functools.partial(self._turn, source, is_whole=False) for source in below]
        if whole is not None:
            turns.append(functools.partial(self._turn, _RoomSource(whole, shown), is_whole=True))
        self._threads = [Ticker("pdstore-room", turn) for turn in turns]

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the threads."""
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.stop(0.0)
        for thread in self._threads:
            thread.stop(deadline.remaining_s())

    def _turn(self, source: _RoomSource, *, is_whole: bool) -> float:
        started_at = time.monotonic()
        with contextlib.suppress(StoreError):  # calls of jobs will report the error
            room = source.read()
            if is_whole:
                self._keep_problem(room.problem)
        return max(self._interval_s, _IDLE_FACTOR * (time.monotonic() - started_at))

    def _keep_problem(self, problem: str | None) -> None:
        if problem is not None:
            _warn_once(problem, _DAY_S)
        if self._guard is not None:
            self._guard.lasting_problem = problem
