"""A redis server's URL, rights and faults: each fault is an error of the store, with its count."""

from __future__ import annotations

import itertools
import socketserver
import time

import pytest
from redis.client import Pipeline

from examples.ports import free_port
from pdstore.errors import (
    ConfigError,
    Reason,
    StoreDenied,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    reason_of,
)
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing import fresh_keys
from pdstore.testing.values import empty_slots, get, put, start_background
from tests.support.redis_server import make_certificate
from tests.support.redis_store import SIZE, opened, put_one

pytestmark = pytest.mark.redis
ACL = "+get +set +exists +expire +unlink +scan +ping"


@pytest.fixture
def guarded_server(redis_server):
    """Users with what a store needs, with leases too, with reading only; and an administrator."""
    rights = {
        "pdstore": ACL,
        "leaser": f"{ACL} +config|get",
        "reader": "+get +exists +expire",
        "lister": "+scan",
    }
    users = [
        ["--user", name, "on", ">p@ss/w", "~pds1:*", "-@all", *right.split()]
        for name, right in rights.items()
    ]
    admin = ["--user", "admin", "on", ">p@ss/w", "~*", "+@all"]
    return redis_server("--user", "default", "off", *admin, *itertools.chain(*users))


def as_user(server, user: str) -> str:
    return f"redis://{user}:p%40ss%2Fw@127.0.0.1:{server.port}"


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
        assert store.lease_s == 0.0, "CONFIG and INFO are refused to this user"
    with opened(as_user(guarded_server, "leaser")) as store:
        store.match([POOL_ID_KEY])
        assert store.lease_s > 0
    with guarded_server.client(username="admin", password="p@ss/w") as raw:
        assert {entry["object"] for entry in raw.acl_log()} == {"config|get", "info"}


@pytest.mark.requirement("R-X-8", "an error names the store and the key")
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


@pytest.mark.misconfiguration("an authority that nobody knows")
def test_tls_is_checked_by_authority_and_the_user_by_the_acl(redis_server, tmp_path):
    cert, key = make_certificate(tmp_path)
    port = str(free_port())
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
    user = ["--user", "pdstore", "on", ">p@ss/w", "~pds1:*", "-@all", *ACL.split()]
    redis_server("--tls-port", port, *map(str, files), "--user", "default", "off", *user)
    [block] = fresh_keys(1)
    mutual, url = f"?ca={cert}&cert={cert}&key={key}", f"rediss://{{}}127.0.0.1:{port}"
    with opened(url.format("pdstore:p%40ss%2Fw@") + mutual) as store:
        value = put_one(store, block, 1 << 20)
        assert get(store, [block], [1 << 20]) == [value]
    said = []
    for options in ("", f"?ca={cert}"):  # an authority nobody knows; no certificate of our own
        with opened(url.format("") + options) as s, pytest.raises(StoreUnavailable) as caught:
            s.match([block])
        said.append("?ca=/path/ca.pem" in str(caught.value))
    assert said == [True, False]
    with opened(url.format("") + mutual) as stranger, pytest.raises(StoreDenied):
        stranger.match([block])


@pytest.mark.misconfiguration("a redis database that the server does not have")
@pytest.mark.misconfiguration(
    "`redis://` to a node of a cluster, `redis+cluster://` to a lone server"
)
@pytest.mark.misconfiguration("`redis+sentinel://` to a redis")
@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis+cluster://127.0.0.1:{}", "write redis://"),
        ("redis://127.0.0.1:{}/77", "0 is there always"),
        ("redis+sentinel://127.0.0.1:{}/pool", "not a sentinel: write redis://127.0.0.1:{}, or"),
    ],
)
def test_an_error_that_the_url_causes_says_what_to_write(redis_server, url, hint):
    port = redis_server().port
    with opened(url.format(port)) as store, pytest.raises(StoreError) as caught:
        store.match(fresh_keys(1))
    assert hint.format(port) in caught.value.remedy
    assert str(caught.value).endswith(f"; {caught.value.remedy}")
    assert "pds1:" not in str(caught.value)


@pytest.fixture
def another_server():
    """Starts a server that speaks redis' protocol and gives one reply to all but PING."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while count := self.rfile.readline():
                sizes = (int(self.rfile.readline()[1:]) for _ in range(int(count[1:])))
                verb, *_ = [self.rfile.read(size + 2) for size in sizes]
                self.wfile.write(b"+PONG\r\n" if verb == b"PING\r\n" else self.server.reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        end = start_background(server.serve_forever)
        yield server
        server.shutdown()
        end(10.0)


EVERY_LISTING = {"stored_values", "room", "clear"}


@pytest.mark.parametrize(
    ("reply", "refused"),
    [
        (b":5\r\n", {"get", *EVERY_LISTING}),
        (b"$-1\r\n", {"which_stored", "length_of", *EVERY_LISTING}),
        (b"*1\r\n:1\r\n", {"which_stored", "get", "length_of", *EVERY_LISTING}),
    ],
)
def test_a_reply_of_another_type_is_an_error_of_the_store(another_server, reply, refused):
    another_server.reply = reply
    [key] = fresh_keys(1)
    with opened(f"redis://127.0.0.1:{another_server.server_address[1]}") as store:
        calls = {
            "match": lambda: store.match([key]),
            "which_stored": lambda: store.which_stored([key]),
            "get": lambda: get(store, [key], [SIZE]),
            "length_of": lambda: store.length_of(key),
            "stored_values": lambda: list(store.stored_values()),
            "room": store.room,
            "clear": lambda: store.clear("0" * 32),
        }
        for verb, call in calls.items():
            if verb not in refused:
                call()
                continue
            with pytest.raises(StoreError, match="is no answer of a redis server") as caught:
                call()
            assert "name the server itself" in caught.value.remedy
            assert reason_of(caught.value) is Reason.STORE_ERROR


def test_a_server_that_hangs_is_a_timeout_and_nothing_comes_late(redis_server):
    server, keys = redis_server(), fresh_keys(2)
    with opened(f"{server.url}?timeout=0.6") as store:
        values = [put_one(store, key) for key in keys]
        slots = empty_slots([SIZE] * 2)
        before = bytes(slots.view)
        server.pause()
        start = time.monotonic()
        with pytest.raises(StoreTimeout):
            store.get(keys, slots)
        with pytest.raises(StoreTimeout):
            store.match(keys)
        assert time.monotonic() - start < 6
        server.resume()
        assert get(store, keys, [SIZE] * 2) == values
        assert bytes(slots.view) == before


def test_a_server_that_dies_in_a_call_leaves_the_number_of_keys_served(redis_server, monkeypatch):
    server, keys, size = redis_server(), fresh_keys(20), 1 << 20
    with opened(server.url) as store:
        execute, calls = Pipeline.execute, []

        def die_before_the_third(pipe, **options):
            calls.append(pipe)
            if len(calls) == 3:
                server.stop()
            return execute(pipe, **options)

        monkeypatch.setattr(Pipeline, "execute", die_before_the_third)
        with pytest.raises(StoreUnavailable) as caught:
            put(store, keys, [b"x" * size] * 20)
        assert caught.value.num_done == 16, "two batches of 8 MiB"


@pytest.mark.misconfiguration(
    "`redis://` to a node of a cluster, `redis+cluster://` to a lone server"
)
def test_a_node_of_a_cluster_is_named_as_such(redis_server):
    # of its own: by default it is 10,000 above the port, which may be too high
    bus = ("--cluster-port", str(free_port()))
    server = redis_server("--cluster-enabled", "yes", *bus)
    [key] = fresh_keys(1)
    with opened(server.url) as store:
        with pytest.raises(StoreError, match=r"is a node of a cluster: write redis\+cluster://"):
            store.match([key])
        with pytest.raises(StoreError, match="is a node of a cluster"):
            put_one(store, key)


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
