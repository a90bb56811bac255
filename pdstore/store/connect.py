"""The store that an engine uses: the one at PDSTORE_STORE, sealed, guarded and metered."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time

from pdstore.errors import BadValue, StoreError
from pdstore.format import block
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.format.namespace import HASH_BYTES
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.store.optional import TellsRoom, find_optional
from pdstore.store.registry import check_url, open_store
from pdstore.store.seal import read_seal_keys, seal_store
from pdstore.store.wrappers import OPEN_S, GuardedStore
from pdstore.threads import Ticker

log = logging.getLogger(__name__)


def check_store(settings: Settings) -> None:
    """Raises the ConfigError of `connect_store` for what is wrong in the settings themselves.

    Opens nothing: for the start of an engine, which connects only when its model is loaded.
    """
    check_url(settings.store, settings)
    if settings.seal_key_file is not None:
        read_seal_keys(settings.seal_key_file)


def connect_store(settings: Settings, metrics: Metrics, *, open_s: float = OPEN_S) -> Store:
    """Opens PDSTORE_STORE; one that does not answer is a warning unless it is required.

    open_s: the first pause of the breaker.
    Raises ConfigError for a bad URL, a bad seal key file or a missing package; StoreError when the
    store is required and away.
    """
    with contextlib.ExitStack() as undo:
        opened = open_store(settings.store, settings)
        undo.callback(opened.close)
        store = GuardedStore(seal_store(opened, settings), metrics, open_s=open_s)
        try:
            store.match([POOL_ID_KEY])
        except StoreError as error:
            if settings.require_store:
                raise
            log.warning("serving without the pool until it appears: %s", error)
        undo.pop_all()
    metrics.add_breaker(lambda: store.is_open)
    metrics.add_codes(store.codes)
    return store


def read_pool_id(store: Store) -> bytes:
    """Returns the random value that names this pool, a new one if it has none.

    Raises StoreError, also if the pool does not keep it.
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
    """Returns the header that is stored under a marker's key; None if none is, or a damaged one.

    Raises StoreError.
    """
    slots = Slots(store.allocate(4096), 4096, [0], [block.HEADER_BYTES])
    return _read_header(store, key, slots)[1]


def _read_header(store: Store, key: BlockKey, slots: Slots) -> tuple[bool, block.Header | None]:
    """Returns whether a value is there, and its header if it is right."""
    try:
        is_there = store.get([key], slots) == 1
    except BadValue:  # of another length: a host that lost its power may leave an empty file
        return True, None
    return is_there, block.read_header(slots.value(0)) if is_there else None


_REST = 50  # times as long as the look took: it may go through every value


class RoomWatch:
    """Asks a store for its room every `every_s` seconds, on a thread of its own.

    A store that cannot tell gets no thread; one that errs keeps its last numbers.
    """

    def __init__(self, store: Store, metrics: Metrics, every_s: float = 15.0) -> None:
        self._store = find_optional(store, TellsRoom)
        self._metrics = metrics
        self._every_s = every_s
        self._num_evicted: int | None = None
        self._thread = Ticker("pdstore-room", self._turn) if self._store else None
        if self._thread is not None:
            self._thread.wake()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def _turn(self) -> float:
        assert self._store is not None
        metrics, started_at = self._metrics, time.monotonic()
        with contextlib.suppress(StoreError):  # the calls that need the store report it
            room = self._store.room()
            metrics.store_used_bytes.set(room.used_bytes or 0)
            metrics.store_capacity_bytes.set(room.capacity_bytes or 0)
            if room.num_evicted is not None:
                before = room.num_evicted if self._num_evicted is None else self._num_evicted
                metrics.store_evictions.inc(max(0, room.num_evicted - before))
                self._num_evicted = room.num_evicted
        return max(self._every_s, _REST * (time.monotonic() - started_at))
