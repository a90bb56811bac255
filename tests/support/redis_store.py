"""RedisStores for tests, and servers with little room."""

from __future__ import annotations

import contextlib

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import content
from pdstore.testing.values import put
from tests.support.kv import eventually

SIZE = 64 << 10


def opened(url: str, **settings) -> contextlib.closing:
    return contextlib.closing(open_store(url, Settings(**settings)))


def small_server(redis_server, policy):
    """Starts a server with room for about 40 values of 64 KiB."""
    server = redis_server("--maxmemory-policy", policy)
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
    return server


def put_one(store, key: BlockKey, size: int = SIZE) -> bytes:
    value = content(key, size)
    assert put(store, [key], [value]) == 1
    return value


def wait_until_found(store, keys, timeout_s: float = 10.0) -> None:
    """Returns when a store that had a fault finds all keys again."""

    def finds_all():
        with contextlib.suppress(StoreError):
            return store.match(keys) == len(keys)

    eventually(finds_all, timeout_s)
