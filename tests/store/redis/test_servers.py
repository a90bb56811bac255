"""Valkey is a redis by another name; sentinels name the master, also the next one."""

from __future__ import annotations

import contextlib

import pytest
import redis

from examples.ports import free_port
from pdstore.errors import StoreError, StoreUnavailable
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, fresh_keys
from pdstore.testing.values import put
from tests.support.redis_cluster import master_with_sentinel
from tests.support.redis_server import RedisServer, need_valkey_server
from tests.support.redis_store import deadline, opened

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("valkey"), binary=need_valkey_server())
    yield server
    server.stop()


class TestValkey(StoreTests):
    @pytest.fixture
    def store(self, valkey):
        with opened(f"valkey://127.0.0.1:{valkey.port}") as store, valkey.client() as self.raw:
            yield store
            self.raw.flushall()

    @pytest.fixture
    def peer(self, valkey):
        with opened(f"valkey+unix://{valkey.socket}") as peer:
            yield peer

    def write_raw(self, store, key, data):
        self.raw.set(key, data)


def test_a_sentinel_names_the_master_and_the_next_one(tmp_path):
    keys = fresh_keys(3)
    with master_with_sentinel(tmp_path) as (master, url), opened(url) as store:
        assert put(store, keys, [b"x"] * 3) == 3
        with master.client() as raw:
            raw.wait(1, 5000)
        master.stop()
        with pytest.raises(StoreUnavailable):
            store.match(keys)
        for _ in deadline(60):
            with contextlib.suppress(StoreError):
                if store.match(keys) == 3:
                    break
        put(store, fresh_keys(1), [b"x"])


def test_close_leaves_no_connection_to_a_sentinel(tmp_path):
    with master_with_sentinel(tmp_path) as (_, url):
        host, port = url.removeprefix("redis+sentinel://").partition("/")[0].split(":")
        with contextlib.closing(redis.Redis(host, int(port))) as sentinel:
            with opened(url) as store:
                store.match(fresh_keys(1))
                assert len(sentinel.client_list()) > 1, "of the store, and our own"
            for _ in deadline():  # the sentinel sees the end a little later
                if len(sentinel.client_list()) == 1:
                    break


def test_no_sentinel_at_all_is_unavailable_in_few_words():
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/pool"
    with opened(url) as store, pytest.raises(StoreUnavailable) as caught:
        store.match(fresh_keys(1))
    said = str(caught.value)
    assert "No master found for 'pool'; write the port of a sentinel (26379)" in said
    assert len(said) < 200


@pytest.mark.parametrize("name", ["redis", "rediss", "valkey", "valkeys"])
@pytest.mark.parametrize("kind", ["", "+unix", "+cluster", "+sentinel"])
def test_every_scheme_opens_a_store_without_connecting(name, kind):
    if kind == "+unix" and name.endswith("s"):
        return  # a socket of this host needs no TLS
    scheme = f"{name}{kind}"
    path = "//run/pool.sock" if scheme.endswith("unix") else "//host"
    path += "/pool" if scheme.endswith("sentinel") else ""
    open_store(f"{scheme}:{path.replace('//run', '///run')}", Settings()).close()
