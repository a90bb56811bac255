"""RedisStore keeps the contract; expiry, pressure, faults, rights, and what it may send."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
import traceback

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
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.state_machine import play_random_calls
from pdstore.testing.threads import run_together, start_background
from pdstore.testing.values import empty_slots, get, put
from tests.support.redis_server import free_port

pytestmark = pytest.mark.redis
SIZE = 64 << 10
ACL = "+get +getrange +set +exists +expire +unlink +scan +ping"


def opened(url: str, **settings) -> contextlib.closing:
    return contextlib.closing(open_store(url, Settings(**settings)))


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

    def write_raw(self, store, key, data):
        store._client.set(key, data)


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
    raise AssertionError(f"not within {seconds} s")


def test_random_calls_agree_with_a_dict(redis_url):
    play_random_calls(lambda: open_store(redis_url, Settings()))


# -- how long values stay


def kinds() -> dict[str, BlockKey]:
    [block] = fresh_keys(1)
    return {
        "block": block,
        "tail": BlockKey(f"{block}:partial:3"),
        "marker": BlockKey(f"{block}:handoff:00:0:done"),
        "pool": POOL_ID_KEY,
    }


def test_values_expire_by_their_kind(redis_server):
    server, keys = redis_server(), kinds()
    with opened(server.url, block_ttl_s=1000, handoff_ttl_s=100) as store, server.client() as raw:
        put(store, list(keys.values()), [b"x"] * 4)
        left = {kind: raw.ttl(key) for kind, key in keys.items()}
        assert 990 < left.pop("block") <= 1000
        assert left.pop("pool") == -1
        assert all(90 < seconds <= 100 for seconds in left.values())


def test_a_match_renews_what_it_found_and_no_more(redis_server):
    server, keys = redis_server(), list(kinds().values())
    with opened(server.url, block_ttl_s=1000, handoff_ttl_s=100) as store, server.client() as raw:
        put(store, keys, [b"x"] * 4)
        for key in keys[:3]:
            raw.expire(key, 10)
        assert store.match(keys[:2]) == 2
        assert (raw.ttl(keys[0]) > 990, raw.ttl(keys[1]) > 90, raw.ttl(keys[2]) > 10) == (
            True,
            True,
            False,
        )
        assert store.match(keys) == 4
        assert (raw.ttl(keys[2]) > 90, raw.ttl(keys[3])) == (True, -1)


def test_a_match_that_stops_early_does_not_renew_what_is_far_behind(redis_server):
    server, keys = redis_server(), fresh_keys(700)
    with opened(server.url) as store, server.client() as raw:
        put(store, keys, [b"x"] * 700)
        raw.expire(keys[600], 10)
        store.remove([keys[40]])
        assert store.match(keys) == 40
        assert raw.ttl(keys[600]) <= 10


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


@pytest.mark.parametrize("how", ["flush", "expire", "unlink"])
def test_a_lost_value_is_a_miss(redis_server, how):
    server, keys = redis_server(), fresh_keys(3)
    with opened(server.url) as store, server.client() as raw:
        put(store, keys, [content(key, SIZE) for key in keys])
        assert store.match(keys) == 3
        if how == "flush":
            raw.flushall()
        elif how == "expire":
            raw.pexpire(keys[1], 0)
        else:
            raw.unlink(keys[1])
        left = 0 if how == "flush" else 1
        assert len(get(store, keys, [SIZE] * 3)) == left
        assert store.match(keys) == left


def test_a_value_of_another_type_is_an_error_of_that_key(redis_server):
    server, keys = redis_server(), fresh_keys(3)
    with opened(server.url) as store, server.client() as raw:
        put_one(store, keys[0])
        raw.rpush(keys[1], "not a string")
        with pytest.raises(StoreError) as caught:
            get(store, keys, [SIZE] * 3)
        assert caught.value.num_done == 1
        store.remove([keys[1]])
        assert len(get(store, keys, [SIZE] * 3)) == 1


# -- rights and secrets


@pytest.fixture
def guarded_server(redis_server):
    """Users with what a store needs, with leases too, with reading only; and an administrator."""
    rights = {
        "pdstore": ACL,
        "leaser": f"{ACL} +config|get",
        "reader": "+get +getrange +exists +expire",
    }
    users = [
        ["--user", name, "on", ">p@ss/w", "~pds1:*", "-@all", *right.split()]
        for name, right in rights.items()
    ]
    admin = ["--user", "admin", "on", ">p@ss/w", "~*", "+@all"]
    return redis_server("--user", "default", "off", *admin, *itertools.chain(*users))


def as_user(server, user: str, password: str = "p%40ss%2Fw") -> str:
    return f"redis://{user}:{password}@127.0.0.1:{server.port}"


def test_the_listed_commands_are_enough_and_no_other_is_tried(guarded_server):
    keys = fresh_keys(3)
    with opened(as_user(guarded_server, "pdstore")) as store:
        values = [put_one(store, key) for key in keys]
        put(store, [POOL_ID_KEY], [b"x"])
        assert store.match([POOL_ID_KEY, *keys]) == 4
        assert get(store, keys, [SIZE] * 3) == values
        assert get(store, fresh_keys(1), [SIZE]) == []
        store.remove(keys[:1])
        store.clear(keys[0].split(":")[1])
        assert store.match(keys[1:]) == 0
        assert store.lease_s == 0.0, "CONFIG is refused to this user"
    with opened(as_user(guarded_server, "leaser")) as store:
        store.match([POOL_ID_KEY])
        assert store.lease_s > 0
    with guarded_server.client(username="admin", password="p@ss/w") as raw:
        assert [entry["object"] for entry in raw.acl_log()] == ["config|get"]


def test_a_user_without_the_right_is_denied_at_the_key(guarded_server):
    keys = fresh_keys(2)
    with opened(as_user(guarded_server, "reader")) as store:
        assert store.match(keys) == 0
        for call in (lambda: put(store, keys, [b"x"] * 2), lambda: store.remove(keys)):
            with pytest.raises(StoreDenied, match=keys[0]) as caught:
                call()
            assert caught.value.num_done == 0
        with pytest.raises(StoreDenied):
            store.match([BlockKey("other:key")])
        with pytest.raises(StoreDenied, match=keys[0].rpartition(":0:0:")[0]):
            store.clear(keys[0].split(":")[1])


@pytest.mark.parametrize("url", ["redis://pdstore:hush-hush@{}", "redis://:hush-hush@{}"])
def test_a_wrong_password_is_denied_and_never_shown(guarded_server, url):
    with opened(url.format(f"127.0.0.1:{guarded_server.port}")) as store:
        with pytest.raises(StoreDenied) as caught:
            store.match(fresh_keys(1))
        everything = "".join(traceback.format_exception(caught.value)) + repr(store) + store.label
        assert "hush" not in everything
        assert f"***@127.0.0.1:{guarded_server.port}" in str(caught.value)


def test_a_server_that_wants_a_password_denies_who_has_none(guarded_server):
    with opened(guarded_server.url) as store, pytest.raises(StoreDenied):
        store.match(fresh_keys(1))


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = "-subj /CN=pdstore -addext subjectAltName=IP:127.0.0.1"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {subject} -keyout {key} -out {cert}"
    subprocess.run(make.split(), check=True, capture_output=True)
    return cert, key


def test_tls_is_checked_against_the_given_authority(redis_server, certificate):
    cert, key = certificate
    port = str(free_port())
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
    redis_server("--tls-port", port, *map(str, files))
    [block] = fresh_keys(1)
    mutual = f"?ca={cert}&cert={cert}&key={key}"
    with opened(f"rediss://127.0.0.1:{port}{mutual}") as store:
        value = put_one(store, block, 1 << 20)
        assert get(store, [block], [1 << 20]) == [value]
    for options in ("", f"?ca={cert}"):  # an authority nobody knows; no certificate of our own
        with opened(f"rediss://127.0.0.1:{port}{options}") as s, pytest.raises(StoreUnavailable):
            s.match([block])


# -- faults


def test_opening_does_not_connect_and_calls_say_who_does_not_answer():
    url, [key] = f"redis://127.0.0.1:{free_port()}", fresh_keys(1)
    with opened(url) as store:
        for call in (
            lambda: store.match([key]),
            lambda: get(store, [key], [SIZE]),
            lambda: put(store, [key], [b"x"]),
            lambda: store.remove([key]),
        ):
            with pytest.raises(StoreUnavailable, match=f"{url}.*{key}") as caught:
                call()
            assert isinstance(caught.value.__cause__, redis.ConnectionError)


def test_a_unix_socket_that_is_not_there_is_unavailable(tmp_path):
    with opened(f"redis+unix://{tmp_path}/none.sock") as store, pytest.raises(StoreUnavailable):
        store.match(fresh_keys(1))


def test_a_server_that_hangs_is_a_timeout_and_nothing_comes_late(redis_server):
    server, keys = redis_server(), fresh_keys(2)
    with opened(f"{server.url}?timeout=0.3") as store:
        values = [put_one(store, key) for key in keys]
        slots = empty_slots([SIZE] * 2)
        before = bytes(slots.view)
        server.pause()
        start = time.monotonic()
        with pytest.raises(StoreTimeout):
            store.get(keys, slots)
        with pytest.raises(StoreTimeout):
            store.match(keys)
        assert time.monotonic() - start < 3
        server.resume()
        assert get(store, keys, [SIZE] * 2) == values
        assert bytes(slots.view) == before


def test_connections_that_a_restart_broke_cost_one_failing_call_at_most(redis_server):
    server = redis_server()
    with opened(server.url) as store:
        together = threading.Barrier(4)

        def use() -> None:
            together.wait(10)
            store.match(fresh_keys(1))

        run_together(*[use] * 4)
        assert len(store._pool._available_connections) > 1
        server.stop()
        server.start()
        assert sum(fails_to_put(store) for _ in range(12)) <= 1


def test_a_server_that_dies_in_a_call_leaves_the_number_of_keys_served(redis_server, monkeypatch):
    server, keys, size = redis_server(), fresh_keys(20), 1 << 20
    with opened(server.url) as store:
        run, calls = store._run, []

        def run_then_die(*args):
            calls.append(args)
            if len(calls) == 3:
                server.stop()
            return run(*args)

        monkeypatch.setattr(store, "_run", run_then_die)
        with pytest.raises(StoreUnavailable) as caught:
            put(store, keys, [b"x" * size] * 20)
        assert caught.value.num_done == 16, "two batches of 8 MiB"


def test_a_full_server_is_store_full_at_the_first_value_that_did_not_fit(redis_server):
    keys = fresh_keys(64)
    with opened(small_server(redis_server, "noeviction").url) as store:
        with pytest.raises(StoreFull, match=r"OOM|maxmemory") as caught:
            put(store, keys, [content(key, SIZE) for key in keys])
        n = caught.value.num_done
        assert 16 <= n < 64
        assert store.match(keys[:n]) == n
        assert store.match(keys[n : n + 1]) == 0


def test_calls_under_way_at_close_leave_no_connection(redis_server):
    server = redis_server()
    with server.client() as raw:
        store = open_store(server.url, Settings())
        calling = threading.Barrier(4)

        def call_until_closed() -> None:
            calling.wait(10)
            while not fails_to_put(store):
                pass

        join = start_background(*[call_until_closed] * 3)
        calling.wait(10)
        store.close()
        join(10)
        for _ in deadline():
            if len(raw.client_list()) == 1:
                break


# -- the URL


def test_the_database_is_the_path_or_an_option(redis_server):
    server, [key] = redis_server(), fresh_keys(1)
    for url in (f"{server.url}/3", f"redis+unix://{server.socket}?db=3"):
        with opened(url) as store, server.client(db=3) as raw:
            put_one(store, key)
            assert raw.unlink(key) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1/x", "'x' is no database number"),
        ("redis+unix:///s?db=-1", "'-1' is no database number"),
        ("redis://127.0.0.1?timeout=0", "timeout must be a positive number"),
        ("redis://127.0.0.1?db=1", "unknown option 'db'; known: timeout"),
        ("redis://127.0.0.1?ca=/x", "unknown option 'ca'"),
        ("rediss://127.0.0.1?x=1", "known: ca, cert, key, timeout"),
        ("redis+unix://?db=1", "redis\\+unix:///path/redis.sock"),
        ("redis://u:hush@127.0.0.1?x=1", "redis://u:\\*\\*\\*@127.0.0.1: unknown option 'x'"),
    ],
)
def test_a_bad_url_says_what_to_write(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        open_store(url, Settings())
    assert "hush" not in str(caught.value)


# -- clear


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


def test_a_clear_on_a_server_that_hangs_is_a_timeout(redis_server):
    server = redis_server()
    with opened(f"{server.url}?timeout=0.2") as store:
        assert store.match(fresh_keys(1)) == 0
        server.pause()
        with pytest.raises(StoreTimeout, match="pds1:0000"):
            store.clear("0" * 32)
        server.resume()
