"""RedisStore keeps the contract; expiry, pressure, faults, rights, and what it may send."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time

import pytest
import redis

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from pdstore.keys import POOL_ID_KEY
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.threads import run_together, start_background
from pdstore.testing.values import empty_slots, get, put
from pdstore.types import BlockKey

pytestmark = pytest.mark.redis
SIZE = 64 << 10
ACL = "+get +getrange +set +exists +expire +unlink +ping"


def opened(url: str, **settings) -> contextlib.closing:
    return contextlib.closing(open_store(url, Settings(**settings)))


@pytest.fixture
def store(redis_url):
    with opened(redis_url) as store:
        yield store


class TestRedisStore(StoreTests):
    @pytest.fixture
    def store(self, redis_url):
        with opened(redis_url) as store:
            yield store

    @pytest.fixture
    def peer(self, redis_url):
        with opened(redis_url) as peer:
            yield peer

    @pytest.fixture
    def small_store(self, redis_server):
        with opened(small_server(redis_server, "noeviction").url) as store:
            yield store

    def write_raw(self, store, key, data):
        store._client.set(key, data)


class TestRedisStoreThatEvicts(StoreTests):
    """On a unix socket, and with a server that makes room by itself."""

    @pytest.fixture
    def store(self, redis_server):
        with opened(f"redis+unix://{redis_server().socket}") as store:
            yield store

    @pytest.fixture
    def small_store(self, redis_server):
        with opened(small_server(redis_server, "volatile-lru").url) as store:
            yield store


def small_server(redis_server, policy):
    """A server with room for about 40 values of 64 KiB."""
    server = redis_server("--maxmemory-policy", policy)
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
    return server


def put_one(store, key: BlockKey, size: int = SIZE) -> bytes:
    value = content(key, size)
    assert put(store, [key], [value]) == 1
    return value


def deadline(seconds: float = 10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.005)
    raise AssertionError(f"not within {seconds} s")
