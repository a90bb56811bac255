"""A redis whose address leads elsewhere, that was idle, or that takes no writes is still used."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from examples.ports import free_port
from pdstore.errors import StoreError, StoreUnavailable
from pdstore.format.keys import BlockKey, Kind, kind_of
from pdstore.testing import fresh_keys
from pdstore.testing.values import get, start_background
from tests.support.kv import eventually
from tests.support.redis_cluster import master_with_sentinel
from tests.support.redis_gate import LOAD, Gate
from tests.support.redis_server import RedisServer, make_certificate, need_valkey_server
from tests.support.redis_store import SIZE, opened, put_one

pytestmark = pytest.mark.redis
SOON_S = 4.0  # less than the time limit of a call, 5 s


@pytest.fixture
def pair(request, tmp_path):
    """A master and its replica, of the kind that the parameter names."""
    binary = need_valkey_server() if getattr(request, "param", "") == "valkey" else None
    with contextlib.ExitStack() as stack:

        def make(name: str, *options: str) -> RedisServer:
            (tmp_path / name).mkdir()
            server = RedisServer(tmp_path / name, *options, binary=binary)
            stack.callback(server.stop)
            return server

        stale = ("--replica-serve-stale-data", "no", "--repl-diskless-sync-delay", "0")
        master = make("master", *stale)
        replica = make("replica", "--replicaof", "127.0.0.1", str(master.port))
        with replica.client() as raw:
            eventually(lambda: raw.info("replication")["master_link_status"] == "up")
        yield master, replica


def fail_over(master: RedisServer, replica: RedisServer, *, to_port: int) -> None:
    """Makes the replica a master, and the master a replica of what is at `to_port`."""
    with replica.client() as raw:
        raw.execute_command("REPLICAOF", "NO", "ONE")
    with master.client() as raw:
        raw.execute_command("REPLICAOF", "127.0.0.1", to_port)


def fill_pool(store, gate: Gate, key: BlockKey, num_connections: int = 3) -> None:
    """Makes the store have so many idle connections."""
    gate.hold(LOAD)
    ends = [start_background(lambda: get(store, [key], [SIZE])) for _ in range(num_connections)]
    eventually(lambda: len(gate.held) == num_connections)
    gate.release()
    for end in ends:
        end(10.0)


@pytest.mark.parametrize("pair", ["redis", "valkey"], indirect=True)
@pytest.mark.parametrize("is_down", [False, True], ids=["READONLY", "MASTERDOWN"])
def test_an_address_that_leads_to_the_new_master_is_followed_at_the_first_call(
    pair, closed_after, is_down
):
    master, replica = pair
    gate = closed_after(Gate(master.port))
    keys = fresh_keys(4)
    with opened(gate.url) as store:
        put_one(store, keys[0])
        fill_pool(store, gate, keys[0])
        with replica.client() as raw:  # a master sends its replica what it has answered already
            eventually(lambda: raw.exists(keys[0]))
        fail_over(master, replica, to_port=free_port() if is_down else replica.port)
        gate.lead_to(replica.port)
        value = put_one(store, keys[1])
        assert store.match(keys[:2]) == 2
        assert get(store, keys[1:2], [SIZE]) == [value]
        num_accepted = gate.num_accepted
        for _ in range(5):
            put_one(store, keys[2])
        assert gate.num_accepted == num_accepted, "the other old connections are gone, too"


def test_a_replica_is_named_as_one_and_costs_no_connection_for_each_call(pair, closed_after):
    master, replica = pair
    gate = closed_after(Gate(replica.port))
    with opened(gate.url) as store:
        start = time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreUnavailable, match="make this name lead to the master"):
                put_one(store, fresh_keys(1)[0])
        num_seconds = int(time.monotonic() - start)
        assert gate.num_accepted < min(20, 5 + num_seconds), "one renewal a second"
    fail_over(master, replica, to_port=free_port())
    with opened(master.url) as store:
        with pytest.raises(StoreUnavailable, match="it is a replica: write its master's") as caught:
            store.match(fresh_keys(1))
        assert "cluster" not in str(caught.value)


@pytest.fixture(params=["plain", "tls"])
def gated(request, redis_server, tmp_path, closed_after):
    """A gate before a server, and a URL through it that ends with an option."""
    if request.param == "plain":
        gate = closed_after(Gate(redis_server().port))
        return gate, f"{gate.url}?"
    cert, key = make_certificate(tmp_path)
    port = free_port()
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
    redis_server("--tls-port", str(port), *map(str, files))
    gate = closed_after(Gate(port))
    return gate, f"{gate.url}?ca={cert}&".replace("redis:", "rediss:")


def test_a_connection_that_was_idle_is_not_used_again(gated):
    """A middlebox may have forgotten it, and would swallow the command."""
    gate, url = gated
    [key] = fresh_keys(1)
    with opened(f"{url}idle=0.05") as store:
        value = put_one(store, key)
        if url.startswith("redis:"):  # through TLS the gate sees no command
            fill_pool(store, gate, key)
        assert gate.forget() >= 1
        threading.Event().wait(0.1)  # the idle time
        start = time.monotonic()
        for _ in range(4):
            assert get(store, [key], [SIZE]) == [value]
        assert time.monotonic() - start < SOON_S


def keepalive_timers(*ports: int) -> list[float]:
    """Returns for each connection to these ports the seconds to its next probe; inf without one."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, _, timer, *_ = line.split()
        if int(remote.partition(":")[2], 16) in ports and state == "01":
            kind, _, left = timer.partition(":")
            found.append(int(left, 16) / 100 if kind == "02" else float("inf"))
    return found


@pytest.mark.parametrize("kind", ["redis", "sentinel"])
def test_the_network_sees_each_idle_connection_once_a_minute(redis_server, tmp_path, kind):
    with contextlib.ExitStack() as stack:
        if kind == "redis":
            server = redis_server()
            url, ports = server.url, (server.port,)
        else:
            server, url = stack.enter_context(master_with_sentinel(tmp_path))
            ports = (server.port, int(url.rpartition(":")[2].partition("/")[0]))
        with opened(url) as store:
            put_one(store, fresh_keys(1)[0])
            eventually(lambda: (t := keepalive_timers(*ports)) and min(t) <= 60)
            mine = [left for left in keepalive_timers(*ports) if left <= 60]
            assert len(mine) >= len(ports), "also those to the sentinels"


def misconf(server: RedisServer) -> None:
    (server.directory / "dump.rdb").mkdir()  # so that no snapshot can be written
    with server.client() as raw:
        raw.config_set("save", "3600 1")
        raw.bgsave()
        eventually(lambda: raw.info("persistence")["rdb_last_bgsave_status"] == "err")


def noreplicas(server: RedisServer) -> None:
    with server.client() as raw:
        raw.config_set("min-replicas-to-write", 1)


@pytest.mark.parametrize("refuse", [misconf, noreplicas])
def test_a_server_that_takes_no_writes_is_still_read(redis_server, refuse):
    server, keys = redis_server(), fresh_keys(3)
    assert {kind_of(key) for key in keys} == {Kind.BLOCK}
    with opened(server.url) as before:
        values = [put_one(before, key) for key in keys[:2]]
        refuse(server)
        with opened(server.url) as after:  # a new connection, too: MISCONF denies even a PING
            for store in (before, after):
                assert store.match(keys) == 2
                assert get(store, keys[:2], [SIZE] * 2) == values
                with pytest.raises(StoreError, match=refuse.__name__.upper()) as caught:
                    put_one(store, keys[2])
                assert caught.value.num_done == 0
