"""Settings of a redis server that a pool should not have, and remedies by the error's class."""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import socket
import socketserver
import struct

import pytest
import redis

from examples.ports import free_port
from pdstore.cli.answer import Level
from pdstore.cli.doctor import check_server, doctor
from pdstore.errors import StoreError, StoreUnavailable, ValueRefused
from pdstore.format.keys import POOL_ID_KEY
from pdstore.metrics import Metrics
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.guard import GuardedStore
from pdstore.store.redis.remedies import remedy_of, short
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put, start_background
from tests.support.kv import eventually
from tests.support.redis_server import make_certificate
from tests.support.redis_store import opened, put_one

pytestmark = pytest.mark.redis


def findings_about(url):
    with opened(url) as store:
        return {finding.subject: finding for finding in check_server(store)}


def test_a_server_for_a_pool_has_nothing_to_improve(redis_server):
    assert findings_about(redis_server("--maxmemory", "1gb").url) == {}


@pytest.mark.misconfiguration("redis writes snapshots or an append-only file")
@pytest.mark.misconfiguration("redis' `maxmemory` is above its host's memory")
@pytest.mark.parametrize(
    ("options", "subject", "words"),
    [
        (("--save", "3600 1"), "persistence", "snapshots (save 3600 1)"),
        (("--appendonly", "yes"), "persistence", "an append-only file"),
        (("--timeout", "1"), "idle connections", "idle for 1 s (timeout 1): nothing is lost"),
        (
            ("--maxmemory", "65536gb"),
            "server memory",
            "maxmemory is 64.0TiB, and the",
        ),
    ],
)
def test_what_a_pool_should_not_have_is_yellow(redis_server, options, subject, words):
    [finding] = findings_about(redis_server(*options).url).values()
    assert (finding.level, finding.subject) == (Level.WARN, subject)
    assert words in finding.said
    assert finding.remedy


@pytest.mark.misconfiguration("redis writes snapshots or an append-only file")
def test_a_server_that_cannot_write_its_snapshot_is_red_and_says_so_to_who_stores(redis_server):
    server = redis_server("--save", "3600 1")
    with server.client() as client:
        (server.directory / "dump.rdb").mkdir()  # so no file can take its place
        client.set("x", 1)
        with contextlib.suppress(Exception):
            client.bgsave()
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 10.0)
    finding = findings_about(server.url)["persistence"]
    assert (finding.level, "refuses all writes" in finding.said) == (Level.BAD, True)
    with opened(server.url) as store, pytest.raises(StoreError) as caught:
        put_one(store, *fresh_keys(1))
    assert 'set `save ""`' in caught.value.remedy
    assert len(str(caught.value)) < 600, "redis explains it in 400 characters"


@contextlib.contextmanager
def one_address_of(*ports, most=math.inf):
    """Serves an address whose connections go to the ports in turn, as a Service's do.

    most: a connection ends when its client has sent more bytes than that.
    """
    turns = itertools.cycle(ports)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            num_sent = 0
            with socket.create_connection(("127.0.0.1", next(turns))) as there:
                ends = {self.request: there, there: self.request}
                while num_sent <= most:
                    for end in select.select([*ends], [], [], 10)[0]:
                        if not (data := end.recv(1 << 16)):
                            return
                        num_sent += len(data) if end is self.request else 0
                        ends[end].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        end = start_background(server.serve_forever)
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        end(10.0)


@pytest.mark.misconfiguration("one address for two redis servers, as a Service with `replicas: 2`")
def test_two_servers_behind_one_address_are_red(redis_server):
    ports = redis_server("--maxmemory", "1gb").port, redis_server("--maxmemory", "1gb").port
    with one_address_of(*ports) as url:
        finding = findings_about(url)["one server"]
    assert finding.level is Level.BAD
    assert "2 servers answer at this address" in finding.said
    assert "redis+cluster://" in finding.remedy
    with one_address_of(ports[0]) as url:
        assert findings_about(url) == {}


@pytest.mark.parametrize("right", ["+config|get", "+info"])
def test_one_of_config_and_info_is_enough_for_leases(redis_server, right):
    user = ["--user", "default", "on", "nopass", "~pds1:*", "-@all", "+exists", "+expire", "+ping"]
    server = redis_server("--maxmemory-policy", "noeviction", *user, right, "+set")
    with opened(server.url) as store:
        put_one(store, POOL_ID_KEY)
        assert store.match([POOL_ID_KEY]) == 1
        assert store.lease_s > 0


@pytest.mark.misconfiguration(
    "a redis user, or a hosted redis, that tells neither `CONFIG` nor `INFO`"
)
def test_a_server_that_tells_nothing_is_yellow_with_the_right_that_is_missing(redis_server):
    user = ["--user", "default", "on", "nopass", "~pds1:*", "-@all", "+exists", "+ping"]
    [finding] = findings_about(redis_server(*user).url).values()
    assert (finding.level, finding.subject) == (Level.WARN, "policy")
    assert "gives no lease" in finding.said
    assert "+info" in finding.remedy
    told = redis_server("--maxmemory", "1gb", *user, "+config|get")
    assert findings_about(told.url) == {}


PROTECTED = (
    "DENIED Redis is running in protected mode because protected mode is enabled and no password"
    " is set for the default user. In this mode connections are only accepted from the loopback"
    " interface. If you want to connect from external computers to Redis you may adopt one of the"
    " following solutions: 1) Just disable protected mode sending the command 'CONFIG SET"
    " protected-mode no' from the loopback interface by connecting to Redis from the same host."
)


def commands_in(sent):
    """Yields the arguments of each command in what a client sends, the command's name first."""
    while count := sent.readline():
        sizes = (int(sent.readline()[1:]) for _ in range(int(count[1:])))
        yield [sent.read(size + 2)[:-2] for size in sizes]


@pytest.mark.misconfiguration("redis in protected mode")
@pytest.mark.misconfiguration("a user of redis may not use a command")
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (PROTECTED, "give it a password (requirepass)"),
        ("LOADING Redis is loading the dataset in memory", "wait until the server has read"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write 0"),
        ("BUSY Redis is busy running a script.", "SLOWLOG GET"),
        ("NOPERM this user has no permissions to run the 'set' command", "docs/stores.md lists"),
    ],
)
def test_the_remedy_follows_the_servers_words(reply, words):
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            for verb, *_ in commands_in(self.rfile):
                self.wfile.write(b"+PONG\r\n" if verb == b"PING" else f"-{reply}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        end = start_background(server.serve_forever)
        with (
            opened(f"redis://127.0.0.1:{server.server_address[1]}") as store,
            pytest.raises(StoreError) as caught,
        ):
            put_one(store, *fresh_keys(1))
        server.shutdown()
        end(10.0)
    assert words in caught.value.remedy
    assert "user and password" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.misconfiguration("the certificate is for another host, or its time is over")
@pytest.mark.parametrize("name", ["IP:10.9.9.9", "DNS:elsewhere"])
def test_a_certificate_for_another_host_is_not_called_an_unknown_authority(
    redis_server, tmp_path, name
):
    cert, key = make_certificate(tmp_path, name)
    port = str(free_port())
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
    redis_server("--tls-port", port, *map(str, files), "--tls-auth-clients", "no")
    with (
        opened(f"rediss://127.0.0.1:{port}?ca={cert}") as store,
        pytest.raises(StoreError) as caught,
    ):
        store.match(fresh_keys(1))
    assert "write a host that the server's certificate names" in caught.value.remedy
    assert "?ca=" not in caught.value.remedy


@pytest.mark.misconfiguration("the certificate is for another host, or its time is over")
@pytest.mark.parametrize(
    ("url", "said", "words"),
    [
        ("rediss://h", "CERTIFICATE_VERIFY_FAILED: certificate has expired", "renew the server's"),
        ("rediss://h", "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "the clock of"),
        ("rediss://h", "CERTIFICATE_VERIFY_FAILED: self-signed certificate", "?ca=/path/ca.pem"),
        ("redis://h", "Connection closed by server.", "or a proxy, ended the connection"),
        ("redis://h", "Error while reading: Connection reset by peer", "one that speaks TLS"),
        ("redis://${HOST}", "Error -2 connecting: Name or service not known.", "host's name"),
    ],
)
def test_the_remedy_follows_the_words_of_the_way_to_the_server(url, said, words):
    assert words in remedy_of(url, redis.ConnectionError(said))


@pytest.mark.misconfiguration("a limit of redis' or a proxy's for sizes, as `proto-max-bulk-len`")
def test_a_limit_of_sizes_is_named_where_small_values_pass_and_large_ones_break(redis_server):
    server = redis_server("--maxmemory", "1gb")
    with server.client() as client:
        client.config_set("proto-max-bulk-len", 1 << 20)
    found = {f["subject"]: f for f in doctor(server.url, count_gpus=lambda: 0).document["findings"]}
    assert found["round trip"]["level"] == "ok"
    assert found["speed: save"]["level"] == "bad"
    assert "proto-max-bulk-len" in found["speed: save"]["remedy"]
    assert "the server's log names it" in found["speed: save"]["remedy"]


LIMITS = [
    ("proto-max-bulk-len", 1 << 20, 3 << 20),
    ("client-query-buffer-limit", 1 << 20, 3 << 20),
    ("maxmemory-clients", 2 << 20, 12 << 20),
]


def refused_puts(url, size, times=4):
    """Puts a value of a size behind a breaker, again and again; returns the errors."""
    with contextlib.closing(GuardedStore(open_store(url, Settings()), Metrics())) as store:
        small, large = fresh_keys(2)
        errors = []
        for _ in range(times):
            with pytest.raises(StoreError) as caught:
                put_one(store, large, size)
            errors.append(caught.value)
            assert not store.is_open
            assert store.problem == str(caught.value), "the page shows it"
            put_one(store, small)
            assert store.match([small, large]) == 1
        return errors


@pytest.mark.misconfiguration("a limit of redis' or a proxy's for sizes, as `proto-max-bulk-len`")
@pytest.mark.parametrize(("option", "limit", "size"), LIMITS)
def test_a_value_over_the_servers_limit_says_nothing_about_the_server(
    redis_server, option, limit, size
):
    server = redis_server("--maxmemory", "1gb")
    with server.client() as client:
        client.config_set(option, limit)
    for error in refused_puts(server.url, size):
        assert isinstance(error, ValueRefused)
        assert option in error.remedy
        assert f"a value of {size:,} bytes" in str(error)


@pytest.mark.misconfiguration("a limit of redis' or a proxy's for sizes, as `proto-max-bulk-len`")
@pytest.mark.parametrize(("option", "limit", "size"), LIMITS)
def test_the_servers_limit_is_told_over_tls_and_a_unix_socket_too(
    redis_server, tmp_path, option, limit, size
):
    cert, key = make_certificate(tmp_path)
    port = str(free_port())
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
    server = redis_server("--tls-port", port, *map(str, files), "--maxmemory", "1gb")
    with server.client() as client:
        client.config_set(option, limit)
    for url in (f"rediss://127.0.0.1:{port}?ca={cert}", f"redis+unix://{server.socket}"):
        for error in refused_puts(url, size):
            assert isinstance(error, ValueRefused)


@pytest.mark.misconfiguration("a limit of redis' or a proxy's for sizes, as `proto-max-bulk-len`")
def test_a_value_that_a_proxy_does_not_let_through_is_told_as_such(redis_server):
    with one_address_of(redis_server("--maxmemory", "1gb").port, most=1 << 20) as url:
        for error in refused_puts(url, 2 << 20):
            assert isinstance(error, ValueRefused)
            assert "a proxy has one of its own" in error.remedy


def test_a_value_over_the_limit_of_replies_is_no_fault_of_the_server(redis_server):
    server, [key] = redis_server("--maxmemory", "1gb"), fresh_keys(1)
    with contextlib.closing(GuardedStore(open_store(server.url, Settings()), Metrics())) as store:
        put_one(store, key, 3 << 20)
        with server.client() as client:
            client.config_set("client-output-buffer-limit", "normal 1048576 0 0")
        for _ in range(4):
            with pytest.raises(ValueRefused):
                get(store, [key], [3 << 20])
        assert not store.is_open


def test_the_values_before_and_after_a_refused_one_are_whole(redis_server):
    server, keys = redis_server("--maxmemory", "1gb"), fresh_keys(3)
    values = [
        content(key, size) for key, size in zip(keys, (1 << 19, 3 << 20, 1 << 19), strict=True)
    ]
    with server.client() as client:
        client.config_set("proto-max-bulk-len", 1 << 20)
    with opened(server.url) as store:
        with pytest.raises(ValueRefused) as caught:
            put(store, keys, values)
        assert caught.value.num_done == 1
        assert get(store, keys[:1], [1 << 19]) == values[:1]
        assert store.which_stored(keys) == [True, False, False]


@contextlib.contextmanager
def limited_server(limit, *, answers):
    """Serves an address that resets the connection of a value that is longer than a limit.

    answers: it first says why, and resets the connection only when the next command comes over it.
    Otherwise its answer is lost: the reset comes before it.
    """
    stored = set()

    def reply_to(verb, key=b"", *_):
        if verb == b"SET":
            stored.add(key)
        is_stored = b":%d" % (key in stored)
        replies = {b"SET": b"+OK", b"PING": b"+PONG", b"EXISTS": is_stored, b"EXPIRE": is_stored}
        return replies.get(verb, b"-ERR unknown command") + b"\r\n"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            reset = struct.pack("ii", 1, 0)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            commands = commands_in(self.rfile)
            for command in commands:
                if max(map(len, command)) > limit:
                    break
                self.wfile.write(reply_to(*command))
            else:
                return
            if answers:
                self.wfile.write(b"-ERR Protocol error: invalid bulk length\r\n")
                next(commands, None)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.shutdown_request = server.close_request  # without a FIN before the reset
        end = start_background(server.serve_forever)
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        end(10.0)


@pytest.mark.misconfiguration("a limit of redis' or a proxy's for sizes, as `proto-max-bulk-len`")
@pytest.mark.parametrize("answers", [True, False], ids=["after its reply", "before its reply"])
def test_a_refused_value_is_told_as_such_whenever_the_server_resets(answers):
    with limited_server(1 << 20, answers=answers) as url:
        for error in refused_puts(url, 2 << 20):
            assert isinstance(error, ValueRefused)
        keys = fresh_keys(3)
        values = [bytes(1 << 19), bytes(2 << 20), bytes(1 << 19)]
        with opened(url) as store:
            with pytest.raises(ValueRefused) as caught:
                put(store, keys, values)
            assert caught.value.num_done == 1
            assert store.which_stored(keys)[:2] == [True, False]


@pytest.mark.parametrize("size", [8, 3 << 20])
def test_a_server_that_ends_every_connection_is_no_limit_of_sizes(redis_server, size):
    with (
        one_address_of(redis_server().port, most=0) as url,
        opened(url) as store,
        pytest.raises(StoreUnavailable),
    ):
        put_one(store, *fresh_keys(1), size)


def test_a_long_explanation_ends_with_a_sentence():
    assert short("short") == "short"
    assert short(PROTECTED).endswith("connections are only accepted from the loopback interface")
    assert len(short("x" * 900)) < 210
