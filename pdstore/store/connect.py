"""The store that an engine uses: the one at PDSTORE_STORE, sealed, guarded, metered and watched."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path

from pdstore.errors import BadValue, ConfigError, MissingExtra, StoreError
from pdstore.format import block
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.format.namespace import HASH_BYTES
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.store.in_place import InPlace
from pdstore.store.optional import Room, TellsRoom, find_optional
from pdstore.store.registry import check_url, open_store
from pdstore.store.wrappers import CircuitBreaker, Instrumented, WrapperStore
from pdstore.threads import Ticker

log = logging.getLogger(__name__)

_KEY_FILE = "PDSTORE_SEAL_KEY_FILE"
_MAKE = "(umask 077; openssl rand -hex 32 > seal.key)"
_MAX_KEYS = 2
_MAX_KEY_FILE_BYTES = 4096
_SEAL_KEY = re.compile("[0-9a-fA-F]{64}")
_PAUSE = 50  # between two looks at a store's room, times as long as one took


def check_store(settings: Settings) -> None:
    """Raises the ConfigError of `connect_store` for what is wrong in the settings themselves.

    Opens nothing: for the start of an engine, which connects only when its model is loaded.
    """
    check_url(settings.store, settings)
    if settings.seal_key_file is not None:
        read_seal_keys(settings.seal_key_file)


def connect_store(settings: Settings, metrics: Metrics) -> Store:
    """Opens PDSTORE_STORE; one that does not answer is a warning unless it is required.

    Raises ConfigError for a bad URL, a bad seal key file or a missing package; StoreError when the
    store is required and away.
    """
    with contextlib.ExitStack() as undo:
        opened = open_store(settings.store, settings)
        undo.callback(opened.close)
        store = CircuitBreaker(
            Instrumented(seal_store(opened, settings), metrics),
            failures=settings.breaker_failures,
            open_s=settings.breaker_open_s,
            max_s=settings.breaker_max_s,
        )
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
    value = slots.value(0)
    for _ in range(3):  # a value that does not verify is removed and written again
        try:
            is_there = store.get([POOL_ID_KEY], slots) == 1
            header = block.read_header(value) if is_there else None
        except BadValue:  # of another length: a host that lost its power may leave an empty file
            is_there, header = True, None
        if header is not None:
            return header.prefix_hash
        if is_there:
            store.remove([POOL_ID_KEY])
        mine = secrets.token_bytes(HASH_BYTES)
        block.seal(value, block.Header(block.FLAG_MARKER, 0, 0, 1, 0, 0, bytes(HASH_BYTES), mine))
        store.put([POOL_ID_KEY], slots)
    raise StoreError(f"{store.label} does not keep the pool's id")


def read_marker(store: Store, key: BlockKey) -> block.Header | None:
    """Returns the header that is stored under a marker's key; None if none is, or a damaged one.

    Raises StoreError.
    """
    slots = Slots(store.allocate(4096), 4096, [0], [block.HEADER_BYTES])
    try:
        return block.read_header(slots.value(0)) if store.get([key], slots) == 1 else None
    except BadValue:
        return None


def seal_store(store: Store, settings: Settings) -> Store:
    """Returns a store that encrypts; the store itself if it does so already or without the setting.

    Raises ConfigError for a key file that cannot be used, MissingExtra without `cryptography`.
    """
    if settings.seal_key_file is None:
        return store
    keys = read_seal_keys(settings.seal_key_file)
    try:  # not at the top: the bare install has no `cryptography`
        from pdstore.format.envelope import Envelopes
        from pdstore.store.encrypted import Encrypted
    except ImportError as error:
        raise MissingExtra(
            f"PDSTORE_SEAL_KEY_FILE needs a package that is not installed ({error.name}):"
            " pip install 'pdstore[seal]'"
        ) from error
    inner = store
    while isinstance(inner, WrapperStore):
        if isinstance(inner, Encrypted):
            return store
        inner = inner.wrapped
    envelopes = Envelopes(keys)
    how = ", through staging" if find_optional(store, InPlace) else ""
    log.info("%s: values are encrypted%s; seal key %s", store.label, how, envelopes.key_id.hex())
    return Encrypted(store, envelopes)


def read_seal_keys(path: Path) -> list[bytes]:
    """Returns the seal keys in a file, the one that encrypts first.

    The file has one key a line, or two during a rotation, each of 64 hex digits; empty lines and
    lines that begin with # do not count. Only its owner may read it.
    Raises ConfigError, which never quotes the file.
    """
    lines = [line.strip() for line in _text_of(path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise ConfigError(
            f"{_KEY_FILE}: {path} has {len(keys)} keys: write one, or two during a rotation;"
            f" make one with {_MAKE}"
        )
    if not all(map(_SEAL_KEY.fullmatch, keys)):
        raise ConfigError(
            f"{_KEY_FILE}: a key in {path} is not 64 hex digits; make one with {_MAKE}"
        )
    found = [bytes.fromhex(key) for key in keys]
    if len(set(found)) < len(found):
        raise ConfigError(f"{_KEY_FILE}: both keys in {path} are the same one")
    return found


def _text_of(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # links are how secrets are mounted
    except OSError as error:
        raise ConfigError(
            f"{_KEY_FILE}: cannot read {path} ({error.strerror}); make a key with {_MAKE}"
        ) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{_KEY_FILE}: {path} is not a file")
        if mode & 0o077:
            raise ConfigError(
                f"{_KEY_FILE}: other users may read {path} (mode {stat.S_IMODE(mode):o}):"
                " chmod 600 it"
            )
        data = os.read(fd, _MAX_KEY_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MAX_KEY_FILE_BYTES or not data.isascii():
        raise ConfigError(f"{_KEY_FILE}: {path} is no key file; make one with {_MAKE}")
    return data.decode("ascii")


class RoomWatch:
    """Asks a store for its room every `every_s` seconds, on a thread of its own.

    A store that cannot tell gets no thread; one that errs keeps its last numbers.
    """

    def __init__(self, store: Store, metrics: Metrics, every_s: float = 15.0) -> None:
        self._teller = find_optional(store, TellsRoom)
        self._metrics, self._every_s = metrics, every_s
        self._num_evicted: int | None = None
        self._thread = Ticker("pdstore-room", self._look) if self._teller else None
        if self._thread is not None:
            self._thread.wake()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stops the thread."""
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def _look(self) -> float:
        assert self._teller is not None
        started_at = time.monotonic()
        with contextlib.suppress(StoreError):  # the calls that need the store report it
            self._show(self._teller.room())
        return max(self._every_s, _PAUSE * (time.monotonic() - started_at))

    def _show(self, room: Room) -> None:
        self._metrics.store_used_bytes.set(room.used_bytes or 0)
        self._metrics.store_capacity_bytes.set(room.capacity_bytes or 0)
        if room.num_evicted is not None:
            before = room.num_evicted if self._num_evicted is None else self._num_evicted
            self._metrics.store_evictions.inc(max(0, room.num_evicted - before))
            self._num_evicted = room.num_evicted
