"""RedisStore keeps the contract; how long values stay, and what is lost."""

from __future__ import annotations

import contextlib

import pytest
import redis

from pdstore.errors import StoreFull, WrongLength
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import get, put
from tests.support.random_calls import play_random_calls
from tests.support.redis_store import SIZE, opened, put_one, small_server
from tests.support.same_arguments import SameArguments

pytestmark = pytest.mark.redis


@pytest.fixture
def raw(redis_url):
    """A client of the redis that all tests share: of it, tests touch their own keys alone."""
    with contextlib.closing(redis.Redis.from_url(redis_url)) as raw:
        yield raw


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

    @pytest.fixture(autouse=True)
    def _raw(self, raw):
        self.raw = raw

    def write_raw(self, store, key, data):
        self.raw.set(key, data, ex=3600)  # nobody may come to delete it


class TestRedisStoreThatEvicts(SameArguments, StoreTests):
    """On a unix socket, and with a server that makes room by itself."""

    @pytest.fixture
    def store(self, redis_server):
        server = redis_server()
        with opened(f"redis+unix://{server.socket}") as store, server.client() as self.raw:
            yield store

    @pytest.fixture
    def small_store(self, redis_server):
        with opened(small_server(redis_server, "volatile-lru").url) as store:
            yield store

    def write_raw(self, store, key, data):
        self.raw.set(key, data)


def test_random_calls_agree_with_a_dict(redis_url):
    play_random_calls(lambda: open_store(redis_url, Settings()))


@pytest.fixture
def kinds(raw):
    """Keys by their kind. The pool has an id; it is not ours to remove if it had one already."""
    [block] = fresh_keys(1)
    had_one = raw.exists(POOL_ID_KEY)
    yield {
        "block": block,
        "tail": BlockKey(f"{block}:partial:3"),
        "marker": BlockKey(f"{block}:handoff:00:0:done"),
        "pool": POOL_ID_KEY,
    }
    if not had_one:
        raw.unlink(POOL_ID_KEY)


def test_values_expire_by_their_kind(redis_url, raw, kinds):
    with opened(redis_url, block_ttl_s=1000, handoff_ttl_s=100) as store:
        put(store, list(kinds.values()), [b"x"] * 4)
        left = {kind: raw.ttl(key) for kind, key in kinds.items()}
        assert 990 < left.pop("block") <= 1000
        assert left.pop("pool") == -1
        assert all(90 < seconds <= 100 for seconds in left.values())


def test_a_match_renews_what_it_found_and_no_more(redis_url, raw, kinds):
    keys = list(kinds.values())
    with opened(redis_url, block_ttl_s=1000, handoff_ttl_s=100) as store:
        put(store, keys, [b"x"] * 4)
        for key in keys[:3]:
            raw.expire(key, 10)
        assert store.match(keys[:2]) == 2
        assert raw.ttl(keys[0]) > 990
        assert raw.ttl(keys[1]) > 90
        assert raw.ttl(keys[2]) <= 10
        assert store.match(keys) == 4
        assert (raw.ttl(keys[2]) > 90, raw.ttl(keys[3])) == (True, -1)


@pytest.mark.parametrize(
    ("policy", "lease_s"), [("noeviction", 95.0), ("allkeys-lru", 0.0), ("volatile-ttl", 0.0)]
)
def test_only_a_server_that_does_not_evict_gives_leases(redis_server, policy, lease_s):
    with opened(redis_server("--maxmemory-policy", policy).url, handoff_ttl_s=100) as store:
        assert store.lease_s == 0.0
        keys = fresh_keys(1)
        put_one(store, keys[0])
        store.match(keys)
        assert store.lease_s == lease_s


def test_a_value_of_another_type_is_corrupt_so_that_it_is_removed_and_heals(redis_url, raw):
    keys = fresh_keys(3)
    with opened(redis_url) as store:
        put_one(store, keys[0])
        raw.rpush(keys[1], "not a string")
        with pytest.raises(WrongLength, match=f"{keys[1]} holds no string") as caught:
            get(store, keys, [SIZE] * 3)
        assert caught.value.num_done == 1
        store.remove([keys[1]])
        assert len(get(store, keys, [SIZE] * 3)) == 1


def test_a_full_server_is_store_full_at_the_first_value_that_did_not_fit(redis_server):
    keys = fresh_keys(64)
    with opened(small_server(redis_server, "noeviction").url) as store:
        with pytest.raises(StoreFull, match=r"OOM|maxmemory") as caught:
            put(store, keys, [content(key, SIZE) for key in keys])
        n = caught.value.num_done
        assert 16 <= n < 64
        assert store.match(keys[:n]) == n
        assert store.match(keys[n : n + 1]) == 0


def test_a_clear_scans_in_steps_and_deletes_in_the_background(redis_server):
    keys = fresh_keys(3000)
    server = redis_server()
    with opened(server.url) as store, server.client() as raw:
        put(store, [*keys, *fresh_keys(2000)], [b"x"] * 5000)
        raw.config_resetstat()
        store.clear(keys[0].split(":")[1])
        calls = {name: stats["calls"] for name, stats in raw.info("commandstats").items()}
        assert raw.dbsize() == 2000
    assert set(calls) <= {"cmdstat_scan", "cmdstat_unlink", "cmdstat_config|resetstat"}
    assert 5 <= calls["cmdstat_scan"] < 10, "so other clients wait for a thousand keys at most"
