"""OpenPool reads values of any length, and refuses a store that cannot list."""

from __future__ import annotations

import pytest

from pdstore.cli import open_pool as module
from pdstore.cli.open_pool import open_pool
from pdstore.errors import ConfigError
from pdstore.format.keys import BlockKey
from pdstore.outcome import Reason
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


def test_a_store_that_cannot_list_is_refused(monkeypatch):
    monkeypatch.setattr(module, "open_store", lambda url, settings: WrapperStore(MemoryStore()))
    with pytest.raises(ConfigError, match="cannot list"), open_pool("memory://"):
        pass
