"""The pool that a command looks at: its store, its keys read back, its values by namespace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import BadValue, ConfigError
from pdstore.format import block
from pdstore.format.block import Header
from pdstore.format.keys import POOL_ID_KEY, BlockKey, Kind, kind_of
from pdstore.format.namespace import Part
from pdstore.outcome import Reason, reason_of
from pdstore.settings import Settings, default_pool_directory, read_settings
from pdstore.store import open_store
from pdstore.store.arena.store import DEFAULT_DIRECTORY
from pdstore.store.base import Slots, Store
from pdstore.store.optional import ListsValues, StoredValue, find_optional
from pdstore.store.seal import seal_store
from pdstore.store.url import StoreURL
from pdstore.store.wrappers import WrapperStore

_HEX, _NUMBER = "([0-9a-f]{32})", "([0-9]{1,9})"  # whoever may write to a pool makes others, too
_BLOCK = re.compile(f"pds1:{_HEX}:{_NUMBER}:{_NUMBER}:{_HEX}(?::partial:{_NUMBER})?")
_MARKER = re.compile(f"pds1:{_HEX}:handoff:{_HEX}:{_NUMBER}:([a-z0-9]{{1,20}})")
_MOST_PARTS = 4096  # no layout has as many, and whoever may write to a pool may name any


class Found(NamedTuple):
    """A stored value, read and checked against its own checksum.

    header: None if the value is damaged, and `reason` says so.
    """

    num_bytes: int
    header: Header | None
    reason: Reason | None


class OpenPool(NamedTuple):
    """A store with its listing, which shows values as they are stored, encrypted ones too."""

    settings: Settings
    store: Store
    lists: ListsValues

    def read(self, key: BlockKey) -> Found | None:
        """Reads a value of any length; None if it is missing. Raises StoreError."""
        stored: int | None = 0
        try:
            stored = self.lists.length_of(key)
            return None if stored is None else self._read(key, stored)
        except BadValue as error:
            return Found(stored or 0, None, reason_of(error))

    def _read(self, key: BlockKey, stored: int) -> Found | None:
        length = stored
        if isinstance(self.store, WrapperStore) and kind_of(key) is not Kind.POOL:
            length -= self.store.added_bytes
        if length <= 0:
            return Found(stored, None, Reason.CORRUPT)
        room = -(-length // 4096) * 4096
        slots = Slots(self.store.allocate(room), room, [0], [length])
        if self.store.get([key], slots) == 0:
            return None
        header = block.read_header(slots.value(0))
        return Found(length, header, None if header else Reason.CORRUPT)


def missing_pool(url: str) -> Path | None:
    """Returns the directory or the arena that opening the store would make; None if it is there."""
    if not url.startswith(("file://", "shm://")):
        return None
    place = StoreURL.of(url)
    if place.scheme == "file":
        if place.host:  # the URL is not right, which opening it tells
            return None
        path = Path(place.path) if place.path else default_pool_directory()
    else:
        directory = Path(place.options.get("dir", DEFAULT_DIRECTORY))
        path = directory / f"pdstore-{os.geteuid()}-{place.host or 'pool'}"
    return None if path.exists() else path


@contextmanager
def open_pool(url: str | None) -> Iterator[OpenPool]:
    """Opens the store at a URL, or at PDSTORE_STORE, and closes it at the end.

    Raises ConfigError, also for a store that cannot list its values, and for files or an arena that
    nobody has made yet; StoreError.
    """
    with open_any(url) as (settings, store, lists):
        if lists is None:
            raise ConfigError(f"{store.label} cannot list its values: no ListsValues (see docs)")
        yield OpenPool(settings, store, lists)


@contextmanager
def open_any(url: str | None) -> Iterator[tuple[Settings, Store, ListsValues | None]]:
    """Opens a store as `open_pool` does, also one that cannot list its values."""
    settings = read_settings(**({"store": url} if url else {}))
    path = missing_pool(settings.store)
    if path is not None:  # opening it would make a pool: an arena of a default size
        raise ConfigError(
            f"there is no pool in {path} yet: the first P or D makes it; if they run, give"
            " PDSTORE_STORE or --store the URL that they have"
        )
    plain = open_store(settings.store, settings)
    store = seal_store(plain, settings)
    try:
        yield settings, store, find_optional(plain, ListsValues)
    finally:
        store.close()


class StoredKey(NamedTuple):
    """The parts of a key.

    name: the prefix hash of a block, the id of a hand-off.
    num_tokens: of a tail; None for whole blocks, whose key does not say.
    state: of a marker: started, done, failed, or stageN for the end of one pipeline stage.
    """

    kind: Kind
    namespace: str
    group: int = 0
    shard: int = 0
    name: str = ""
    num_tokens: int | None = None
    state: str | None = None

    @classmethod
    def parsed(cls, key: BlockKey) -> StoredKey | None:
        """Reads a key; None for one that pdstore does not make."""
        if key == POOL_ID_KEY:
            return cls(Kind.POOL, "")
        if block := _BLOCK.fullmatch(key):
            namespace, group, shard, name, tokens = block.groups()
            num_tokens = int(tokens) if tokens else None
            return cls(kind_of(key), namespace, int(group), int(shard), name, num_tokens)
        if marker := _MARKER.fullmatch(key):
            namespace, name, shard, state = marker.groups()
            return cls(Kind.HANDOFF, namespace, 0, int(shard), name, None, state)
        return None


@dataclass
class NamespaceUse:
    """The values of one namespace in the pool, counted.

    youngest_s, oldest_s: seconds since the last use; None where the store does not tell.
    sample: the key of one whole block, from which the block size can be read.
    """

    hex: str
    num_bytes: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    parts: set[Part] = field(default_factory=set)
    youngest_s: float | None = None
    oldest_s: float | None = None
    sample: StoredValue | None = None

    @property
    def num_values(self) -> int:
        return sum(self.counts.values())

    def add(self, value: StoredValue, key: StoredKey) -> None:
        self.num_bytes += value.num_bytes
        self.counts[key.kind] += 1
        if key.kind in (Kind.BLOCK, Kind.TAIL) and len(self.parts) < _MOST_PARTS:
            self.parts.add(Part(key.group, key.shard))
        if key.kind is Kind.BLOCK:
            self.sample = value
        if value.age_s is not None:
            self.youngest_s = min(value.age_s, self.youngest_s or value.age_s)
            self.oldest_s = max(value.age_s, self.oldest_s or value.age_s)


def survey(values: Iterable[StoredValue]) -> list[NamespaceUse]:
    """Counts values by namespace, the largest first; the pool's own id belongs to none."""
    uses: dict[str, NamespaceUse] = {}
    for value in values:
        key = StoredKey.parsed(value.key)
        if key is not None and key.namespace:
            uses.setdefault(key.namespace, NamespaceUse(key.namespace)).add(value, key)
    return sorted(uses.values(), key=lambda use: -use.num_bytes)
