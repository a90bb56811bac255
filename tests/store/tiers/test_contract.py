"""Stacks of tiers keep the contract of a store."""

from __future__ import annotations

import pytest

from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.arena.store import ArenaStore
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.testing import StoreTests
from tests.support.same_arguments import SameArguments, SameArgumentsAndBatches

SIZE = 64 << 10


class Stacks(StoreTests):
    """Opens `store` and `peer` over the same stores, which `open_stores` opens anew for each."""

    has_one_version = False

    @pytest.fixture
    def store(self, open_tiers, open_stores):
        return open_tiers(*open_stores())

    @pytest.fixture
    def peer(self, store, open_tiers, open_stores):
        return open_tiers(*open_stores())


class TestMemoryOverFiles(SameArgumentsAndBatches, Stacks):
    @pytest.fixture
    def open_stores(self, name, tmp_path):
        return lambda: (MemoryStore(f"memory://{name}"), FileStore(tmp_path / "files"))

    @pytest.fixture
    def small_store(self, open_tiers, tmp_path):
        memory = MemoryStore(budget=16 * SIZE)
        return open_tiers(memory, FileStore(tmp_path / "small", budget=40 * SIZE))


class TestArenaOverFiles(SameArgumentsAndBatches, Stacks):
    @pytest.fixture
    def open_stores(self, arena_of, tmp_path):
        return lambda: (arena_of(), FileStore(tmp_path / "files"))

    @pytest.fixture
    def small_store(self, open_tiers, library, tmp_path, name):
        arena = ArenaStore(library, f"{name}-small", directory=tmp_path, size=3 << 20)
        return open_tiers(arena, FileStore(tmp_path / "small", budget=40 * SIZE))


class TestThreeTiers(Stacks):
    @pytest.fixture
    def open_stores(self, name, arena_of, tmp_path):
        return lambda: (
            MemoryStore(f"memory://{name}"),
            arena_of(),
            FileStore(tmp_path / "files"),
        )


@pytest.mark.redis
class TestArenaOverRedis(SameArguments, Stacks):
    @pytest.fixture
    def open_stores(self, arena_of, redis_url):
        return lambda: (arena_of(), open_store(redis_url, Settings()))


@pytest.mark.redis
class TestRedisOverFiles(SameArgumentsAndBatches, Stacks):
    @pytest.fixture
    def open_stores(self, redis_url, tmp_path):
        return lambda: (open_store(redis_url, Settings()), FileStore(tmp_path / "files"))
