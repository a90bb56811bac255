"""StatusServer: JSON and a page on this host alone; a real browser shows what happens."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from pdstore.cli.answer import Level
from pdstore.cli.peers import check_peers
from pdstore.errors import ConfigError
from pdstore.status.server import StatusServer
from tests.support.browser import needs_browser, shown
from tests.support.mini_engine_kit import ask, hand_over, pd_of, prompt_of, until


@pytest.fixture
def serve(closed_after):
    def serve(take, port=0, **options):
        return closed_after(closed_after(StatusServer(port, take, **options)))  # twice

    return serve


@pytest.fixture
def connect(closed_after):
    """Opens raw connections to a server's address."""

    def connect(url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        return closed_after(socket.create_connection(address, 10))

    return connect


@contextlib.contextmanager
def running(function):
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


def get(url, **headers):
    return httpx.get(url, headers=headers, trust_env=False, timeout=10)


def test_the_page_and_the_json(serve):
    url = serve(lambda: {"role": "decode"}).url
    assert get(url).text.startswith("<!doctype html>")
    assert get(f"{url}/pdstore").json() == {"role": "decode"}


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models", "/else"])
def test_another_path_is_told_where_the_api_is_also_in_the_line_that_prometheus_shows(serve, path):
    answer = get(serve(dict).url + path)
    assert answer.status_code == 404
    assert answer.reason_phrase == answer.json()["error"]["message"]
    assert "/metrics are at the port of the API" in answer.reason_phrase


def test_a_router_that_sends_prompts_to_the_page_is_told_where_the_api_is(serve):
    url = serve(dict).url + "/v1/completions"
    answer = httpx.post(url, json={"prompt": "x" * 500_000}, trust_env=False, timeout=10)
    assert answer.status_code == 404
    assert "at the port of the API" in answer.json()["error"]["message"]


@pytest.mark.misconfiguration("a port that is taken")
def test_a_port_that_is_taken_names_the_setting(serve):
    port = int(serve(dict).url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"PDSTORE_STATUS_PORT={port}"):
        StatusServer(port, dict)


def test_a_client_that_stops_sending_keeps_it_from_nobody_for_long(serve, connect):
    server = serve(dict, request_s=0.5)
    connect(server.url).sendall(b"GET / HTTP/1.1\r\n")
    assert get(server.url).status_code == 200


@pytest.mark.parametrize("request_s", [0.5, 600.0])
def test_a_client_that_trickles_holds_neither_the_page_nor_its_end(serve, connect, request_s):
    """A byte often enough for any limit of one read."""
    server = serve(dict, request_s=request_s)
    url = server.url
    slow, is_over = connect(url), threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                slow.sendall(b"G")

    with running(trickle):
        if request_s < 1:
            assert get(url).status_code == 200
        start = time.monotonic()
        server.close()
        took_s = time.monotonic() - start
        StatusServer(int(url.rpartition(":")[2]), dict).close()  # the port is free
        is_over.set()
    assert took_s < 20
    assert not [each for each in threading.enumerate() if each.name == "pdstore-status"]


def test_a_client_that_does_not_read_the_page_holds_it_for_its_time_alone(serve, connect):
    server = serve(lambda: {"much": "x" * (32 << 20)}, request_s=0.5)
    connect(server.url).sendall(b"GET /pdstore HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert get(server.url).status_code == 200


@pytest.mark.slow
@pytest.mark.redis
@needs_browser
def test_a_browser_shows_the_handoffs_and_that_the_store_died(open_engine, redis_server, tmp_path):
    redis = redis_server()
    store = f"redis://:secret-word@127.0.0.1:{redis.port}/0?timeout=0.5"
    with redis.client() as client:
        client.config_set("requirepass", "secret-word")
    p = open_engine(pd=pd_of("prefill", store))
    d = open_engine(pd=pd_of("decode", store, status_port=0))

    def handed_over(seed):
        prompt = prompt_of(100, seed)
        ask(d, prompt, kv_transfer_params=hand_over(p, prompt), id=f"req-{seed}").wait()

    for seed in range(5):
        handed_over(seed)
    url = d.adapter.reporting.url
    page = shown(url, tmp_path)
    assert "all is well" in page
    assert "req-4" in page
    assert "var(--load)" in page
    redis.stop()
    for seed in range(5, 8):
        handed_over(seed)
    until(lambda: d.problem)
    page = shown(url, tmp_path)
    assert "degraded: " in page
    assert "store_down" in page
    assert "secret-word" not in page + json.dumps(get(f"{url}/pdstore").json())


@pytest.mark.slow
@pytest.mark.redis
@needs_browser
def test_a_browser_shows_each_tier_and_which_is_left_out(open_engine, redis_server, tmp_path):
    redis = redis_server()
    with redis.client() as client:
        client.config_set("requirepass", "secret-word")
    below = f"redis://:secret-word@127.0.0.1:{redis.port}/0?timeout=0.5&copy=1GB/s"
    store = f"memory://shown?budget=64MiB file://{tmp_path}/below?budget=1GiB {below}"
    d = open_engine(pd=pd_of("both", store, status_port=0))
    url = d.adapter.reporting.url

    def last_tier():
        return get(f"{url}/pdstore").json()["tiers"][-1]

    ask(d, prompt_of(100, 1)).wait()
    until(lambda: last_tier()["copies"].get("copied"))
    page = shown(url, tmp_path)
    for label in ("0: memory://shown", f"1: file://{tmp_path}/below", "2: redis://"):
        assert label in page
    assert " of 1.0 GiB" in page
    assert page.count(" copied</td>") == 2
    assert "left out" not in page.partition("<script>")[0]
    redis.stop()
    seeds = iter(range(2, 1000))
    until(lambda: ask(d, prompt_of(100, next(seeds))).wait() and last_tier()["is_out"])
    page = shown(url, tmp_path)
    assert "left out until it answers" in page.partition("<script>")[0]
    assert "secret-word" not in page + json.dumps(get(f"{url}/pdstore").json())


@pytest.mark.misconfiguration("one URL for two places, as `redis://127.0.0.1` on two hosts")
def test_doctor_compares_the_pools_and_namespaces_of_instances(open_engine, tmp_path):
    store = f"file://{tmp_path}/pool"
    pds = [pd_of(role, store, status_port=0) for role in ("prefill", "decode", "both", "both")]
    pds[2]["salt"], pds[3]["store"] = "another-tenant", f"file://{tmp_path}/apart"
    engines = [open_engine(pd=pd) for pd in pds]
    for engine in engines:
        until(lambda cache=engine.adapter.cache: cache.pool_id)
    p, d, *others = [engine.adapter.reporting.url for engine in engines]
    assert not wrong_of(check_peers([p, d]))
    salt, pool = wrong_of(check_peers([p, *others]))
    assert salt.subject == "namespace: salt"
    assert "another-tenant" not in salt.said
    assert (pool.subject, pool.remedy) == ("pool", "give both the same PDSTORE_STORE")


@pytest.mark.misconfiguration("`?lease=` differs")
def test_doctor_compares_the_leases_of_instances(open_engine, tmp_path):
    stores = [f"file://{tmp_path}/pool?lease={seconds}" for seconds in (1, 60)]
    engines = [open_engine(pd=pd_of("both", store, status_port=0)) for store in stores]
    for engine in engines:
        until(lambda cache=engine.adapter.cache: cache.pool_id)
    found = check_peers([engine.adapter.reporting.url for engine in engines])
    [lease] = [finding for finding in found if finding.remedy]
    assert lease.level is Level.WARN
    assert lease.remedy.startswith("write the same ?lease= in PDSTORE_STORE of both")


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS` that no prompt fills")
def test_the_engine_tells_at_its_start_of_blocks_that_none_of_its_prompts_fills(
    open_engine, tmp_path, caplog
):
    changes = {"block_tokens": 1024, "staging": "64MiB"}
    open_engine(pd=pd_of("both", f"file://{tmp_path}/pool", **changes))
    assert "PDSTORE_BLOCK_TOKENS=1024, and no prompt has over 512: " in caplog.text


def wrong_of(findings):
    return [finding for finding in findings if finding.level is Level.BAD]
