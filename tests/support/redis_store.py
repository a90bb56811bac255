"""RedisStores for tests, and servers with little room."""

from __future__ import annotations

import contextlib
import time

from pdstore.errors import StoreError
from pdstore.format.keys import BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import put

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


def fails_to_put(store) -> bool:
    try:
        put_one(store, fresh_keys(1)[0])
    except StoreError:
        return True
    return False


def deadline(seconds: float = 10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.005)
    raise AssertionError(f"the condition did not come true within {seconds} s")
