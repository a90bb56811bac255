"""Clusters, sentinels and valkeys."""

from __future__ import annotations

import contextlib
import time

import pytest
from redis.crc import key_slot

from pdstore.errors import ConfigError, StoreTimeout, StoreUnavailable
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import get, put
from tests.support.kv import eventually
from tests.support.redis_cluster import ClusterOfServers, master_with_sentinel
from tests.support.redis_server import RedisServer, make_certificate, need_valkey_server
from tests.support.redis_store import SIZE, opened, wait_until_found
from tests.support.same_arguments import SameArguments

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Three masters; no test stops one for good."""
    cluster = ClusterOfServers(tmp_path_factory.mktemp("cluster"), replicas=0)
    with contextlib.closing(cluster):
        cluster.wait()
        yield cluster


@pytest.fixture
def cluster(shared):
    yield shared
    shared.flush()


@pytest.fixture
def store(cluster):
    with opened(f"{cluster.url}?timeout=0.5") as store:
        yield store


def node_of(cluster, key) -> int:
    """The number of the master that has a key's slot."""
    return min(key_slot(key.encode()) * 3 // 16384, 2)


@contextlib.contextmanager
def small(server, room_bytes):
    """Makes a server evict what it has no room for; in the end it is large and empty again."""
    with server.client() as raw:
        raw.config_set("maxmemory-policy", "volatile-lru")
        raw.config_set("maxmemory", raw.info("memory")["used_memory"] + room_bytes)
        yield
        raw.config_set("maxmemory", 0)
        raw.config_set("maxmemory-policy", "noeviction")
        raw.flushall()


class TestRedisCluster(SameArguments, StoreTests):
    @pytest.fixture
    def store(self, cluster):
        with opened(cluster.url) as store:
            self.cluster = cluster
            yield store

    @pytest.fixture
    def peer(self, cluster):
        with opened(cluster.url) as peer:
            yield peer

    @pytest.fixture
    def small_store(self, cluster):
        with contextlib.ExitStack() as stack:
            for node in cluster.masters:
                stack.enter_context(small(node, 2 << 20))
            yield stack.enter_context(opened(cluster.url))

    def write_raw(self, store, key, data):
        with self.cluster.masters[node_of(self.cluster, key)].client() as raw:
            raw.set(key, data)


def test_a_prompts_keys_are_spread_and_every_result_is_a_prefix(cluster, store):
    keys = fresh_keys(60)
    values = [content(key, SIZE) for key in keys]
    assert put(store, keys, values) == 60
    for node in cluster.masters:
        with node.client() as raw:
            assert raw.dbsize() > 5
    assert store.match(keys) == 60
    assert get(store, keys, [SIZE] * 60) == values
    store.remove([keys[41], keys[50]])
    assert store.match(keys) == 41
    assert get(store, keys, [SIZE] * 60) == values[:41]
    assert store.which_stored(keys[40:43]) == [True, False, True]


def test_leases_need_every_master_to_keep_what_it_has(cluster):
    with cluster.masters[1].client() as raw, opened(cluster.url) as store:
        raw.config_set("maxmemory-policy", "volatile-lru")
        keys = fresh_keys(1)
        put(store, keys, [b"x"])
        store.match(keys)
        raw.config_set("maxmemory-policy", "noeviction")
        assert store.lease_s == 0.0


def test_a_node_that_hangs_costs_a_call_one_time_out(cluster, store):
    keys = fresh_keys(60)
    put(store, keys, [b"x"] * 60)
    first = next(i for i, key in enumerate(keys) if node_of(cluster, key) == 1)
    cluster.masters[1].pause()
    start = time.monotonic()
    try:
        with pytest.raises(StoreTimeout) as caught:
            get(store, keys, [1] * 60)
        assert caught.value.num_done == first
        assert time.monotonic() - start < 5, "not a timeout for each of twenty keys"
    finally:
        cluster.masters[1].resume()
    wait_until_found(store, keys)


@pytest.fixture(params=["unknown-endpoint", "hostname"])
def nameless(request, cluster):
    """A cluster whose nodes are to be called by names that they do not have."""
    kinds = "cluster-preferred-endpoint-type"
    for value in (request.param, "ip"):
        for node in cluster.masters:
            with node.client() as raw:
                raw.config_set(kinds, value)
        if value != "ip":
            yield cluster


def test_nodes_without_a_name_are_reached_by_their_address(nameless):
    keys = fresh_keys(30)
    with opened(nameless.url) as store:
        assert put(store, keys, [b"x"] * 30) == 30
        assert store.match(keys) == 30
        assert len({node_of(nameless, key) for key in keys}) == 3


def test_a_slot_that_moves_between_nodes_without_a_name_is_followed(nameless):
    """ASK has no host then, or `?`."""
    [key] = fresh_keys(1)
    here = node_of(nameless, key)
    there, slot = (here + 1) % 3, key_slot(key.encode())
    with (
        nameless.masters[here].client() as old,
        nameless.masters[there].client() as new,
        opened(nameless.url) as store,
    ):
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", nameless.names[here])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", nameless.names[there])
        try:
            assert put(store, [key], [b"one"]) == 1
            assert get(store, [key], [3]) == [b"one"]
            assert new.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        finally:
            new.flushall()
            for node in (old, new):
                node.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_slot_that_moves_or_has_moved_is_followed(cluster, store, is_moved):
    [key] = fresh_keys(1)
    slot, here = key_slot(key.encode()), node_of(cluster, key)
    there = (here + 1) % 3
    assert put(store, [key], [b"one"]) == 1
    source, target = cluster.masters[here], cluster.masters[there]
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.names[here])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.names[there])
        old.migrate("127.0.0.1", target.port, [key], 0, 5000)
        if is_moved:
            give(cluster, slot, there)
        assert get(store, [key], [3]) == [b"one"]
        assert store.match([key]) == 1
        store.remove([key])
        give(cluster, slot, here)
    eventually(lambda: put(store, [key], [b"two"]) and get(store, [key], [3]) == [b"two"])


def give(cluster, slot: int, number: int) -> None:
    """Tells every master whose a slot is from now on, the new owner first."""
    for node in (cluster.masters[number], *cluster.masters):
        with node.client() as raw:
            raw.execute_command("CLUSTER", "SETSLOT", slot, "NODE", cluster.names[number])


@pytest.mark.nightly
def test_a_cluster_over_tls_is_checked_by_its_authority(tmp_path):
    cert, key = map(str, make_certificate(tmp_path))
    files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
    home = tmp_path / "nodes"
    home.mkdir()
    cluster = ClusterOfServers(
        home, replicas=0, tls=(*files, "--tls-auth-clients", "no", "--port", "0")
    )
    url, keys = cluster.url.replace("redis", "rediss", 1), fresh_keys(30)
    with contextlib.closing(cluster):
        cluster.wait()
        with opened(f"{url}?ca={cert}") as store:
            assert put(store, keys, [b"x"] * 30) == 30
            assert store.match(keys) == 30
        with opened(url) as stranger, pytest.raises(StoreUnavailable, match=r"ca=/path/ca\.pem"):
            stranger.match(keys)


def test_a_replica_takes_over_from_a_master_that_dies(tmp_path):
    cluster, keys = ClusterOfServers(tmp_path, node_timeout_ms=1000), fresh_keys(30)
    idle = opened(cluster.url)
    with contextlib.closing(cluster), opened(cluster.url) as store, idle as idle_store:
        cluster.wait()
        assert put(store, keys, [b"x"] * 30) == 30
        assert idle_store.match(keys) == 30
        for node in cluster.masters:
            with node.client() as raw:
                assert raw.wait(1, 10_000) == 1
        cluster.masters[2].stop()
        with pytest.raises(StoreUnavailable):
            store.match(keys)
        wait_until_found(store, keys, 60)
        assert put(store, fresh_keys(30), [b"x"] * 30) == 30
        idle_store.clear(keys[0].split(":")[1])
        assert not any(store.which_stored(keys)), "it looked for the masters of now"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("valkey"), binary=need_valkey_server())
    yield server
    server.stop()


class TestValkey(SameArguments, StoreTests):
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
        with small(valkey, 4 << 20), opened(f"valkey://127.0.0.1:{valkey.port}") as store:
            yield store

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
        wait_until_found(store, keys, 60)
        put(store, fresh_keys(1), [b"x"])


def test_a_sentinels_url_names_the_master():
    with pytest.raises(ConfigError, match="redis\\+sentinel://host:26379/mymaster"):
        open_store("redis+sentinel://127.0.0.1:26379", Settings())
