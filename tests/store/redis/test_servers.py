"""Valkey is a redis by another name; sentinels name the master, also the next one."""

from __future__ import annotations

import contextlib

import pytest

from examples.ports import free_port
from pdstore.errors import ConfigError, StoreError, StoreUnavailable
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, fresh_keys
from pdstore.testing.values import put
from tests.support.redis_cluster import ClusterOfServers, master_with_sentinel
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

    @pytest.fixture
    def small_store(self, valkey):
        with valkey.client() as raw:
            raw.config_set("maxmemory-policy", "volatile-lru")
            raw.config_set("maxmemory", raw.info("memory")["used_memory"] + (4 << 20))
            with opened(f"valkey://127.0.0.1:{valkey.port}") as store:
                yield store
            raw.config_set("maxmemory", 0)
            raw.flushall()

    def write_raw(self, store, key, data):
        self.raw.set(key, data)


@pytest.mark.nightly
def test_a_cluster_of_valkeys_is_a_cluster(tmp_path):
    cluster = ClusterOfServers(tmp_path, replicas=0, binary=need_valkey_server())
    with contextlib.closing(cluster):
        cluster.wait()
        keys = fresh_keys(30)
        with opened(cluster.url.replace("redis", "valkey")) as store:
            assert put(store, keys, [b"x"] * 30) == 30
            assert store.match(keys) == 30


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


def test_no_sentinel_at_all_is_unavailable_in_few_words():
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/pool"
    with opened(url) as store, pytest.raises(StoreUnavailable) as caught:
        store.match(fresh_keys(1))
    said = str(caught.value)
    assert "No master found for 'pool'; write the port of a sentinel (26379)" in said
    assert len(said) < 200


def test_a_sentinels_url_names_the_master():
    with pytest.raises(ConfigError, match="redis\\+sentinel://host:26379/mymaster"):
        open_store("redis+sentinel://127.0.0.1:26379", Settings())
