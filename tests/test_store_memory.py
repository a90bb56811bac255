"""MemoryStore keeps the contract, shares by name, and evicts by use."""

from __future__ import annotations

import contextlib
import secrets

import pytest

from pdstore.store.memory import MemoryStore
from pdstore.testing import StoreTests


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self):
        with contextlib.closing(MemoryStore(f"memory://{secrets.token_hex(8)}")) as store:
            yield store

    @pytest.fixture
    def peer(self, store):
        with contextlib.closing(MemoryStore(store.label)) as peer:
            yield peer

    @pytest.fixture
    def small_store(self):
        with contextlib.closing(MemoryStore(budget=24 * 64 << 10)) as store:
            yield store

    def write_raw(self, store, key, data):
        store._shelf.add(key, data)
