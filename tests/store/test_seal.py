"""seal_store: the setting alone decides, and what is missing is told."""

from __future__ import annotations

import contextlib
import sys

import pytest

from pdstore.errors import ConfigError, MissingExtra
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.store.connect import connect_store
from pdstore.store.memory import MemoryStore
from pdstore.store.seal import Encrypted, seal_store
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, put
from tests.support.seal_key import write_seal_key


@pytest.fixture
def settings(tmp_path):
    return read_settings(store="memory://", seal_key_file=write_seal_key(tmp_path / "key"))


def test_without_the_setting_nothing_changes():
    store = MemoryStore()
    assert seal_store(store, read_settings()) is store


def test_a_store_is_encrypted_once(settings):
    store = seal_store(MemoryStore(), settings)
    assert isinstance(store, Encrypted)
    assert seal_store(store, settings) is store
    with contextlib.closing(connect_store(settings, Metrics())) as connected:
        assert seal_store(connected, settings) is connected


def test_two_instances_with_one_key_file_read_each_other(settings):
    inner, keys = MemoryStore(), fresh_keys(1)
    assert put(seal_store(inner, settings), keys, [b"x" * 99]) == 1
    assert get(seal_store(inner, settings), keys, [99]) == [b"x" * 99]
    assert inner.match(keys) == 1


def test_a_bad_key_file_refuses_to_start(tmp_path):
    settings = read_settings(store="memory://", seal_key_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="PDSTORE_SEAL_KEY_FILE: cannot read"):
        connect_store(settings, Metrics())


def test_without_the_package_its_extra_is_named(settings, monkeypatch):
    monkeypatch.delitem(sys.modules, "pdstore.format.envelope")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[seal\]'"):
        seal_store(MemoryStore(), settings)
