"""Pools that cannot work: the log names the trouble in time, and what to look at."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.ports import free_port
from pdstore.cli.doctor import try_store
from pdstore.errors import Reason
from pdstore.format.handoff import Handoff
from pdstore.metrics import Metrics
from pdstore.settings import LOOKUP_TIMEOUT_S, read_settings
from pdstore.store.connect import connect_store
from pdstore.store.guard import OPEN_S, guard_of
from pdstore.store.url import without_secret
from pdstore.testing.values import start_background
from tests.support.kv import BLOCK_BYTES, Instance, eventually, patience

BLOCKS, PROMPT, MANY = list(range(20)), range(100), range(320)
SOON_S = 20.0  # on a busy machine
WAITED_FOR_P = (Reason.HANDOFF_DEAD, Reason.HANDOFF_GONE, Reason.HANDOFF_LATE)


@pytest.fixture
def over(redis_server, closed_after):
    """Makes instances over the store of a URL, guarded as an engine's.

    They are closed before the servers of redis: Python's ssl leaves a socket open that is reset
    just when a TLS handshake begins.
    """

    def over(url, *, lookup_timeout_s=LOOKUP_TIMEOUT_S, open_s=OPEN_S, **changes):
        store = connect_store(read_settings(store=url, **changes), Metrics(), open_s=open_s)
        return closed_after(
            Instance(closed_after(store), lookup_timeout_s=lookup_timeout_s, **changes)
        )

    return over


def saved(one, tokens=PROMPT):
    """Saves a prompt and publishes it; returns the job's result and the parameters for D."""
    keys = one.cache.keys(tokens)
    handoff, params = one.cache.announce(keys)
    return one.pool.save(keys, BLOCKS, handoff=handoff).wait(SOON_S), params


def found(one, params=None, tokens=PROMPT):
    return one.cache.lookup(one.cache.keys(tokens), params).wait(SOON_S)


def assert_said(caplog, *words):
    """Soon one line of the log has all these words."""

    def is_said():
        lines = [record.getMessage() for record in caplog.records]
        return any(all(word in line for word in words) for line in lines)

    eventually(is_said, SOON_S)


def test_two_arenas_of_one_name_are_told_to_be_of_two_users_or_hosts(over, caplog, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    p, d = (over(f"shm://pool?size=8MiB&dir={tmp_path}/{name}") for name in "pd")
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    _, params = saved(p)
    assert found(d, params).reason is Reason.OTHER_POOL
    assert_said(caplog, "run them as one user on one host", "this instance's pool is /dev/shm/pdst")


def test_arenas_over_files_are_told_to_be_in_the_directory_of_their_url(
    caplog, tmp_path, closed_after
):
    for name in "pd":
        (tmp_path / name).mkdir()
    instances = []
    for name in "pd":
        url = f"shm://pool?size=8MiB&dir={tmp_path}/{name} file://{tmp_path}/below"
        store = closed_after(connect_store(read_settings(store=url), Metrics()))
        instances.append(closed_after(Instance(store, store_url=url)))
    p, d = instances
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    _, params = saved(p)
    assert found(d, params).reason is Reason.OTHER_POOL
    assert_said(caplog, "run them as one user on one host", f"pool is {tmp_path}/d/pdstore-")


@pytest.mark.misconfiguration("P and D name two directories, redis databases or servers")
@pytest.mark.parametrize("kind", ["directory", "redis db", "redis server"])
def test_p_and_d_with_pools_of_their_own_are_told_to_share_one(
    over, caplog, tmp_path, redis_server, kind
):
    if kind == "directory":
        urls = [f"file://{tmp_path}/{name}" for name in "pd"]
    elif kind == "redis db":
        server = redis_server().url
        urls = [f"{server}/0", f"{server}/1"]
    else:
        urls = [redis_server().url for _ in range(2)]
    p, d = over(urls[0]), over(urls[1], handoff_wait_s=30.0)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    _, params = saved(p)
    begin = time.monotonic()
    assert found(d, params).reason is Reason.OTHER_POOL
    assert time.monotonic() - begin < SOON_S
    place = without_secret(urls[1])
    assert_said(caplog, "give both the same PDSTORE_STORE", f"{place} is another place for each")


@pytest.mark.misconfiguration("two deployments in one redis database")
def test_two_deployments_in_one_redis_db_are_kept_apart_and_cleared_apart(over, redis_server):
    url = redis_server().url
    one, other = over(url), over(url, salt="another deployment")
    assert saved(one)[0].reason is None
    assert found(other).num_tokens == 0
    assert saved(other)[0].reason is None
    one.cache.clear()
    assert found(one).num_tokens == 0
    assert found(other).num_tokens == len(PROMPT)


@pytest.mark.misconfiguration("redis' `maxmemory` is too small")
@pytest.mark.misconfiguration("redis with `noeviction` is full")
@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru"])
def test_a_redis_without_room_is_told_with_maxmemory(over, caplog, redis_server, policy):
    server = redis_server("--maxmemory", "1mb", "--maxmemory-policy", policy)
    one = over(server.url)
    result, _ = saved(one, MANY)
    assert result.reason in (Reason.STORE_FULL, Reason.LOST)
    assert_said(caplog, "a save fell short", "the pool's size")
    if policy == "noeviction":
        assert_said(caplog, "a save fell short", "set it to volatile-lru")


@pytest.mark.misconfiguration("the budget or the disk is full, or a prompt needs more")
def test_a_budget_below_a_prompt_is_told(over, caplog, tmp_path):
    one = over(f"file://{tmp_path}/pool?budget={3 * BLOCK_BYTES}")
    result, _ = saved(one, MANY)
    assert result.reason in (Reason.STORE_FULL, Reason.LOST)
    assert_said(caplog, "a save fell short", "?budget=")


@pytest.mark.misconfiguration("nobody listens at the port")
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_port_where_nobody_listens_is_told_at_once(over, caplog, scheme):
    begin = time.monotonic()
    one = over(f"{scheme}://127.0.0.1:{free_port()}")
    assert found(one).reason is Reason.STORE_DOWN
    assert time.monotonic() - begin < SOON_S
    assert_said(caplog, "serving without the pool until it appears", "refused")
    assert_said(caplog, "a lookup fell short (store_down)", "pdstore doctor")


@pytest.mark.misconfiguration("another server listens at redis' port")
def test_a_server_that_speaks_something_else_is_called_that(over, caplog):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        end = start_background(server.serve_forever)
        found(over(f"redis://127.0.0.1:{server.server_port}"))
        assert_said(caplog, "no redis server: is the port right")
        server.shutdown()
        end(SOON_S)


@pytest.mark.misconfiguration("`rediss://` to a server without TLS")
def test_tls_to_a_server_without_it_costs_seconds_and_says_so(over, caplog, redis_server):
    begin = time.monotonic()
    url = f"rediss://127.0.0.1:{redis_server().port}?timeout=1"
    assert found(over(url, lookup_timeout_s=SOON_S)).reason is Reason.STORE_DOWN
    assert time.monotonic() - begin < SOON_S
    assert_said(caplog, "a server without it is redis://")


@pytest.mark.misconfiguration("a wrong password")
def test_a_wrong_password_stays_one_however_often_it_is_tried(over, caplog, redis_server):
    server = redis_server("--requirepass", "right")
    one = over(f"redis://:wrong-word@127.0.0.1:{server.port}", open_s=60.0)
    assert {found(one).reason for _ in range(6)} == {Reason.STORE_DENIED}
    assert_said(caplog, "a lookup fell short (store_denied)", "user and password in PDSTORE_STORE")
    assert "wrong-word" not in caplog.text


def url_of_a_mistake(mistake, redis_server, stack):
    """Returns a store URL that cannot work, and what the first line says to write."""
    if mistake == "a replica":
        master = redis_server()
        replica = redis_server("--replicaof", "127.0.0.1", str(master.port))
        return replica.url, "it is a replica: write its master's address"
    if mistake == "too many clients":
        full = redis_server("--maxclients", "1")
        stack.enter_context(full.client()).ping()
        return full.url, "max number of clients reached; raise maxclients of the server"
    if mistake == "a sentinel's URL to a redis":
        port = redis_server().port
        words = f"not a sentinel: write redis://127.0.0.1:{port}, or a sentinel's port (26379)"
        return f"redis+sentinel://127.0.0.1:{port}/pool", words
    host = f"127.0.0.1:{redis_server('--requirepass', 'hush-hush').port}"
    if mistake == "no password":
        return f"redis://{host}/0", f"write its password: redis://:PASSWORD@{host}"
    return f"redis://hush-hush@{host}/0", f"a password alone is redis://:PASSWORD@{host}"


@pytest.mark.misconfiguration("redis wants a password and the URL has none")
@pytest.mark.misconfiguration("the password in the user's place, `redis://secret@host`")
@pytest.mark.misconfiguration("the redis is a replica")
@pytest.mark.misconfiguration("redis' `maxclients` is reached")
@pytest.mark.misconfiguration("`redis+sentinel://` to a redis")
@pytest.mark.parametrize(
    "mistake",
    [
        *("a replica", "too many clients", "a sentinel's URL to a redis"),
        *("no password", "a password in the user's place"),
    ],
)
def test_a_redis_that_cannot_be_used_is_told_at_once_with_what_to_write(
    caplog, redis_server, mistake
):
    with contextlib.ExitStack() as stack:
        url, words = url_of_a_mistake(mistake, redis_server, stack)
        settings = read_settings(store=url)
        store = stack.enter_context(contextlib.closing(connect_store(settings, Metrics())))
        one = stack.enter_context(contextlib.closing(Instance(store)))
        if mistake != "a replica":  # which shows at the first write
            assert_said(caplog, "serving without the pool until it appears: ", words)
        for _ in range(5):  # the breaker is open after three
            found(one)
        assert_said(caplog, "a lookup fell short", words)
        finding = try_store(settings, store)
        assert words.rpartition("; ")[2] in finding.remedy, "not what doctor says of any other"
    assert "Look at whether the store runs" not in caplog.text
    assert "hush-hush" not in caplog.text + finding.said + finding.remedy + store.label


@pytest.mark.misconfiguration("`PDSTORE_HANDOFF_TTL_S` is too short")
def test_a_marker_that_expired_before_d_came_is_told_with_the_setting(over, caplog, redis_server):
    server = redis_server()
    p, d = over(server.url, handoff_ttl_s=1), over(server.url, handoff_wait_s=0.5)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    result, params = saved(p)
    assert result.reason is None
    marker = Handoff.of(params).id.done(p.namespace, 0)
    with server.client() as client:  # a match by the store would be a use, and prolong it
        eventually(lambda: not client.exists(marker), SOON_S)
    assert found(d, params).reason in (Reason.HANDOFF_LATE, Reason.HANDOFF_GONE)
    assert_said(caplog, "a lookup fell short (handoff_")


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TTL_S` is too short")
@pytest.mark.parametrize("is_set", ["on both", "on P"])
def test_blocks_that_expired_before_d_came_are_told_with_the_setting(
    over, caplog, redis_server, is_set
):
    server = redis_server()
    changes = {"block_ttl_s": 1} if is_set == "on both" else {}
    p, d = over(server.url, block_ttl_s=1), over(server.url, **changes)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    assert_said(caplog, "PDSTORE_BLOCK_TTL_S=1: ", "blocks may expire before D loads them")
    result, params = saved(p)
    assert result.reason is None
    with server.client() as client:
        names = p.cache.keys(PROMPT).store_keys(p.namespace.parts)
        eventually(lambda: not client.exists(names[0]), SOON_S)
    assert found(d, params).reason is Reason.ABSENT
    assert_said(caplog, "its blocks have expired", "PDSTORE_BLOCK_TTL_S (here ", "set more than")
    assert "eviction policy" not in caplog.text


@pytest.mark.parametrize("ttl_s", [1800, 100])
def test_blocks_that_redis_evicted_before_d_came_are_told_as_such(
    over, caplog, redis_server, ttl_s
):
    server = redis_server("--maxmemory-policy", "volatile-lru")
    changes = {"block_ttl_s": ttl_s}
    p, d = over(server.url, **changes), over(server.url, **changes)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    result, params = saved(p)
    assert result.reason is None
    marker = Handoff.of(params).id.done(p.namespace, 0)
    with server.client() as client:
        client.persist(marker)  # redis evicts all that expires, and not this
        client.config_set("maxmemory", 1)
        with contextlib.suppress(Exception):  # there is nothing left to evict
            client.set("x", "y")
        client.config_set("maxmemory", 0)
        assert client.exists(marker)
    assert found(d, params).reason is Reason.ABSENT
    assert_said(caplog, "its blocks were evicted", "eviction policy")
    assert ("PDSTORE_BLOCK_TTL_S=100" in caplog.text) is (ttl_s == 100)


@pytest.mark.misconfiguration("an address of IPv6")
def test_an_address_of_ipv6_is_one(over):
    one = over(f"redis://[::1]:{free_port()}")
    assert found(one).reason is Reason.STORE_DOWN
    assert one.store.label.startswith("redis://[::1]:")


@pytest.mark.misconfiguration("proxies in the environment")
def test_proxies_in_the_environment_are_not_asked_for_a_pool(over, redis_server, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert saved(over(redis_server().url))[0].reason is None


@pytest.mark.misconfiguration("D starts before P, and before the pool")
def test_a_d_that_starts_before_p_and_before_the_pool_takes_the_next_hand_off(over, redis_server):
    server = redis_server()
    server.stop()
    d = over(server.url, handoff_wait_s=SOON_S, open_s=0.05)
    assert found(d).reason is Reason.STORE_DOWN
    server.start()
    p = over(server.url)
    _, params = saved(p)
    eventually(lambda: found(d, params).num_tokens == len(PROMPT), SOON_S)


@pytest.mark.misconfiguration("P dies before it has published")
def test_a_p_that_dies_before_it_has_published_is_told_at_ds_deadline(over, caplog):
    p, d = over("memory://dies"), over("memory://dies", handoff_wait_s=0.5)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)
    _, params = p.cache.announce(p.cache.keys(PROMPT))
    assert found(d, params).reason in (Reason.HANDOFF_LATE, Reason.HANDOFF_GONE)
    assert_said(caplog, "a lookup fell short (handoff_", "whether P lives")


@pytest.mark.misconfiguration("D's clock is an hour off")
@pytest.mark.parametrize("hours", [-1, 1])
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_clock_of_d_that_is_an_hour_off_costs_nothing(
    over, tmp_path, redis_server, monkeypatch, kind, hours
):
    url = f"file://{tmp_path}/pool" if kind == "file" else redis_server().url
    p, d = over(url), over(url)
    _, params = saved(p)
    here, here_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: here() + 3600 * hours)
    monkeypatch.setattr(time, "time_ns", lambda: here_ns() + 3600 * 10**9 * hours)
    match = found(d, params)
    assert (match.num_tokens, match.reason) == (len(PROMPT), None)
    assert d.pool.load(match.keys, BLOCKS).wait(SOON_S).num_tokens == len(PROMPT)


def _replica(redis_server, tmp_path, stack):
    master, server = redis_server(), redis_server()
    client = stack.enter_context(server.client())

    def turn(is_bad):
        client.execute_command(
            "REPLICAOF", *(("127.0.0.1", master.port) if is_bad else ("NO", "ONE"))
        )

    return server.url, turn


def _full_redis(redis_server, tmp_path, stack):
    server = redis_server("--maxmemory-policy", "noeviction")
    client = stack.enter_context(server.client())
    return server.url, lambda is_bad: client.config_set("maxmemory", 1 if is_bad else 0)


def _too_many_clients(redis_server, tmp_path, stack):
    server = redis_server()
    client = stack.enter_context(server.client())

    def turn(is_bad):
        client.config_set("maxclients", 1 if is_bad else 1000)
        if is_bad:
            client.client_kill_filter(_type="normal", skipme=True)

    return server.url, turn


def _no_inodes(redis_server, tmp_path, stack):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=64m,nr_inodes=60,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
    stack.callback(subprocess.run, ["umount", "-l", disk], check=True)

    def turn(is_bad):
        if not is_bad:
            for path in disk.glob("other*"):
                path.unlink()
        with contextlib.suppress(OSError):  # no inode is left
            for n in itertools.count() if is_bad else ():
                (disk / f"other{n}").touch()

    return f"file://{disk}/pool", turn


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.misconfiguration("P cannot write: no inodes, a replica, `maxclients`, no memory")
@pytest.mark.parametrize("kind", [_replica, _full_redis, _too_many_clients, _no_inodes])
def test_a_store_that_takes_no_writes_costs_d_one_wait(stack, over, redis_server, tmp_path, kind):
    url, turn = kind(redis_server, tmp_path, stack)
    p, d = over(url, role="prefill"), over(url, role="decode", handoff_wait_s=30.0)
    eventually(lambda: p.cache.pool_id and d.cache.pool_id, SOON_S)

    def handed_over(n):
        tokens = [n, *range(150)]
        keys = p.cache.keys(tokens)
        handoff, params = p.cache.announce(keys)
        noted = threading.Event()
        job = p.pool.save(keys, BLOCKS, handoff=handoff)
        job.on_end(lambda job: (p.cache.note_saves([job.result.reason]), noted.set()))
        result = job.wait(SOON_S)
        assert noted.wait(SOON_S), "a job has ended before its watchers are told"
        begin = time.monotonic()
        found = d.cache.follow(d.cache.keys(tokens), params).wait(SOON_S)
        loaded = d.pool.load(found.keys, BLOCKS, follow=found.follow).wait(SOON_S).num_tokens
        waited_s = time.monotonic() - begin
        if said := params["pdstore"].get("last_save"):
            assert found.reason not in WAITED_FOR_P
            limit_s = 1.0 * patience()
            assert waited_s < limit_s, "P's death is noticed after 1.35 s; here it takes 0.03 s"
        return result.reason, said, loaded

    turn(True)
    reason, said, loaded = handed_over(0)
    assert reason is not None
    assert (said, loaded) == (None, 0)
    for n in (1, 2):
        before = reason
        reason, said, loaded = handed_over(n)
        assert (said, loaded) == (before.value, 0)
    turn(False)
    # under load a call that fails takes long, so that an open breaker makes none but its probes
    eventually(lambda: not any(guard_of(one.store).is_open for one in (p, d)), SOON_S)
    assert handed_over(3) == (None, reason.value, 151)
    assert handed_over(4) == (None, None, 151)
