"""OpenPool reads values of any length, and refuses a store that cannot list."""

from __future__ import annotations

import pytest

from pdstore.cli import open_pool as module
from pdstore.cli.open_pool import open_pool
from pdstore.errors import ConfigError
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import put

KEY = BlockKey("pds1:" + "a" * 32 + ":0:0:" + "b" * 32)


def test_what_is_no_value_of_ours_is_damaged(file_url):
    with open_pool(file_url) as pool:
        assert pool.read(KEY) is None
        put(pool.store, [KEY], [b"short"])
        assert pool.read(KEY) == (5, None, Reason.CORRUPT)


@pytest.mark.redis
def test_what_is_no_value_at_all_is_damaged(redis_server):
    server = redis_server()
    with server.client() as raw, open_pool(server.url) as pool:
        raw.rpush(KEY, "a list")
        assert pool.read(KEY) == (0, None, Reason.CORRUPT)


@pytest.mark.parametrize("name", ["file://{}/pool", "shm://pool?dir={}"])
def test_looking_makes_no_pool(name, tmp_path):
    url = name.format(tmp_path)
    with pytest.raises(ConfigError, match="there is no pool in"), open_pool(url):
        pass
    assert not [*tmp_path.iterdir()]
    open_store(f"{url}{'&size=8MiB' if url.startswith('shm') else ''}", read_settings()).close()
    with open_pool(url) as pool:
        assert pool.read(KEY) is None


def test_a_store_that_cannot_list_is_refused(monkeypatch):
    monkeypatch.setattr(module, "open_store", lambda url, settings: WrapperStore(MemoryStore()))
    with pytest.raises(ConfigError, match="cannot list"), open_pool("memory://"):
        pass
