"""SQLiteStore keeps the contract, opened by its URL as an engine opens it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from functools import partial

import pytest

from pdstore import Settings
from pdstore.errors import ConfigError, StoreError, StoreUnavailable
from pdstore.store import open_store
from pdstore.testing import StoreTests, fresh_keys
from pdstore.testing.values import run_together


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path}/pool.db"


class TestSQLiteStore(StoreTests):
    @pytest.fixture
    def store(self, url):
        with contextlib.closing(open_store(url, Settings())) as store:
            yield store

    @pytest.fixture
    def peer(self, url):
        with contextlib.closing(open_store(url, Settings())) as peer:
            yield peer

    def write_raw(self, store, key, data):
        store.match([key])  # makes the file
        with contextlib.closing(sqlite3.connect(store.label.removeprefix("sqlite://"))) as plain:
            plain.execute("INSERT INTO blocks VALUES (?, ?)", [key, data])
            plain.commit()


def test_those_that_open_a_new_file_at_once_all_can(tmp_path):
    """Of 20 new files, two or three gave an error when nobody tried again."""
    for number in range(20):
        url, begin = f"sqlite://{tmp_path}/{number}.db", threading.Barrier(4)
        run_together(*[partial(_look, url, begin)] * begin.parties)


def _look(url, begin):
    with contextlib.closing(open_store(url, Settings())) as store:
        begin.wait()
        assert store.match(fresh_keys(1)) == 0


def test_a_directory_that_is_missing_is_an_error_of_the_call_and_not_of_the_opening(tmp_path):
    store = open_store(f"sqlite://{tmp_path}/no/pool.db", Settings())
    with pytest.raises(StoreUnavailable, match="unable to open"):
        store.match(fresh_keys(1))
    store.close()


def test_a_file_that_is_no_database_is_an_error_of_the_store(tmp_path):
    (tmp_path / "pool.db").write_bytes(b"something else" * 1000)
    store = open_store(f"sqlite://{tmp_path}/pool.db", Settings())
    with pytest.raises(StoreError, match="not a database"):
        store.match(fresh_keys(1))
    store.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite://host/pool.db", "sqlite:///x.db?size=1"])
def test_a_url_of_another_form_is_refused_with_the_right_one(url):
    with pytest.raises(ConfigError, match=r"write sqlite:///|known: timeout"):
        open_store(url, Settings())
