"""A file store's pool as it lies on disk, for tests."""

from __future__ import annotations

import os
import random
import re
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import put

SIZE = 64 << 10
_BLOCK = re.compile(r"pds1:[0-9a-f]{32}:(\d+):\d+:")


def root_of(store) -> Path:
    return Path(store.label.removeprefix("file://"))


def path_of(store, key) -> Path:
    """Returns the path of a key's value: it is in one of 256 directories."""
    return root_of(store) / f"{zlib.crc32(key.encode()) % 256:02x}" / key


def planted_at(store, key) -> Path:
    path_of(store, key).parent.mkdir(mode=0o700, exist_ok=True)
    return path_of(store, key)


def fill(store, count, *, age_s=0.0):
    """Puts values that were last used `age_s` ago."""
    keys = fresh_keys(count)
    for key in keys:
        assert put(store, [key], [content(key, SIZE)]) == 1
        age(store, key, age_s)
    return keys


def age(store, key, seconds):
    used_at = time.time() - seconds
    os.utime(path_of(store, key), (used_at, used_at))


def stored(store, keys):
    return [key for key in keys if path_of(store, key).exists()]


def num_temporaries(store) -> int:
    return len(list((root_of(store) / "tmp").iterdir()))


class Losses:
    """A pool that loses values by chance: of its blocks and tails, not of its markers.

    by_group: how many it has lost of each KV group that it has values of.
    """

    def __init__(self, pool: Path, rate: float) -> None:
        self._pool, self._rate = pool, rate
        self._random = random.Random(5)
        self._seen: set[Path] = set()
        self.by_group: Counter[str] = Counter()

    def lose(self) -> int:
        """Loses some of the values that are new since the last call; returns how many."""
        new = sorted(set(self._pool.rglob("pds1:*")) - self._seen)
        self._seen.update(new)
        before = self.by_group.total()
        for path in new:
            if key := _BLOCK.match(path.name):
                is_lost = self._random.random() < self._rate
                self.by_group[key[1]] += is_lost
                if is_lost:
                    path.unlink()
        return self.by_group.total() - before


class FileStoreTests(StoreTests):
    """The contract of stores over a directory, which a class's `open_at(name, budget)` opens."""

    @pytest.fixture
    def store(self, open_at):
        return open_at("pool")

    @pytest.fixture
    def peer(self, open_at, store):
        return open_at("pool")

    @pytest.fixture
    def small_store(self, open_at):
        return open_at("small", 24 * SIZE)

    def write_raw(self, store, key, data):
        planted_at(store, key).write_bytes(data)
