"""FileStore keeps the contract."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pdstore.store.file import FileStore
from pdstore.testing import StoreTests


class TestFileStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "pool")) as store:
            yield store

    @pytest.fixture
    def peer(self, store, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "pool")) as peer:
            yield peer

    @pytest.fixture
    def small_store(self, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "small", budget=24 * 64 << 10)) as store:
            yield store

    def write_raw(self, store, key, data):
        Path(store._directory.path(key)).write_bytes(data)
