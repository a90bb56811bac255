"""Checks of P and D through real HTTP: equal, differing, in two pools, silent."""

from __future__ import annotations

import contextlib
import itertools
import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import start_http_server

from pdstore.cli.answer import Level
from pdstore.cli.peers import check_peers
from pdstore.metrics import Metrics

FIELDS = {"dtype": '"bfloat16"', "block_tokens": "64", "salt": "null"}


@contextlib.contextmanager
def instance(status):
    """Serves a status as an instance does, or anything else; or what a function returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(status() if callable(status) else status).encode()
            self.send_response(200 if self.path == "/pdstore" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def compare():
    def compared(*statuses):
        with contextlib.ExitStack() as stack:
            urls = [stack.enter_context(instance(status)) for status in statuses]
            return list(check_peers(urls))

    return compared


def status_of(pool="aa" * 16, store="redis://127.0.0.1:6379", lease_s=0.0, **fields):
    namespace = {"hex": "00", "fields": FIELDS | fields}
    return {"namespace": namespace, "pool": {"id": pool, "lease_s": lease_s}, "store": store}


def found_wrong(found):
    return [finding for finding in found if finding.level is Level.BAD]


def test_equal_instances_agree(compare):
    found = compare(status_of(), status_of(store="redis://localhost:6379"))
    assert [f.subject for f in found if f.level is Level.OK] == ["pool", "namespace"]
    assert not [f for f in found if f.level is Level.BAD]


@pytest.mark.misconfiguration(
    "salt, weights, block tokens, order, shards, layer ranges or KV heads differ"
)
def test_each_field_that_differs_is_red_with_both_values(compare):
    found = compare(status_of(), status_of(dtype='"float16"', salt="#1234"))
    wrong = {f.subject: f.said for f in found if f.level is Level.BAD}
    assert set(wrong) == {"namespace: dtype", "namespace: salt"}
    assert '"bfloat16" at' in wrong["namespace: dtype"]
    assert '"float16" at' in wrong["namespace: dtype"]


@pytest.mark.misconfiguration("P and D have two versions of pdstore, whose formats differ")
def test_another_format_is_another_version_to_install(compare):
    [wrong] = found_wrong(compare(status_of(format="1"), status_of(format="2")))
    assert wrong.subject == "namespace: format"
    assert wrong.remedy.startswith("install the same version of pdstore for both")


def test_what_decides_the_blocks_and_the_states_of_an_engine_is_named(compare):
    found = compare(
        status_of(block_tokens="128", form='"f32 SD"', speculation="2"),
        status_of(block_tokens="256", form='"f32 DS"'),
    )
    remedies = {each.subject: each.remedy for each in found_wrong(found)}
    names = ["block_tokens", "form", "speculation"]
    assert set(remedies) == {f"namespace: {name}" for name in names}
    assert "speculation differs" in remedies["namespace: speculation"]
    assert "the same --speculative-config, or neither" in remedies["namespace: speculation"]
    assert "TP size, dtypes, speculation and --block-size" in remedies["namespace: block_tokens"]
    assert "kernels, block size and kind of GPU" in remedies["namespace: form"]


def test_two_pools_are_red_with_both_urls(compare):
    other = "redis://10.0.0.2:6379"
    [wrong] = found_wrong(compare(status_of(), status_of(pool="bb" * 16, store=other)))
    assert wrong.subject == "pool"
    assert "aaaaaaaa (redis://127.0.0.1:6379) at" in wrong.said
    assert f"bbbbbbbb ({other}) at" in wrong.said
    assert wrong.remedy == "give both the same PDSTORE_STORE"


def test_what_an_instance_says_is_wrong_with_its_pool_is_yellow(compare):
    problem = "/dev/shm/pdstore-0-pool was removed while this instance ran"
    [found] = [f for f in compare(status_of() | {"problem": problem}, status_of()) if f.remedy]
    assert (found.level, found.subject) == (Level.WARN, "degraded")
    assert found.said.endswith(f" says: {problem}")
    assert "that instance's log" in found.remedy


@pytest.mark.misconfiguration("`?lease=` differs")
def test_two_leases_of_one_pool_are_yellow_with_both_and_what_to_write(compare):
    [found] = [f for f in compare(status_of(lease_s=1), status_of(lease_s=60)) if f.remedy]
    assert (found.level, found.subject) == (Level.WARN, "lease")
    assert found.said.startswith("1 s at http://")
    assert ", 60 s at http://" in found.said
    assert found.remedy.startswith("write the same ?lease= in PDSTORE_STORE of both")


@pytest.mark.misconfiguration("one URL for two places, as `redis://127.0.0.1` on two hosts")
def test_two_pools_of_equal_urls_are_red_and_the_url_is_called_what_it_is(compare):
    [wrong] = found_wrong(compare(status_of(), status_of(pool="bb" * 16)))
    assert wrong.subject == "pool"
    assert wrong.remedy.startswith("redis://127.0.0.1:6379 is another place for each")


def test_two_arenas_of_one_url_are_two_users_or_two_hosts(compare):
    one, other = (status_of(pool=pool * 16, store="shm://pool") for pool in ("aa", "bb"))
    [wrong] = found_wrong(compare(one, other))
    assert "run both as one user, with one /dev/shm" in wrong.remedy
    assert "Service" not in wrong.remedy


@pytest.mark.misconfiguration("a `--peer` without pdstore")
@pytest.mark.parametrize("status", [{}, [], {"namespace": {"fields": None}}])
def test_an_instance_without_a_status_is_red_and_says_what_to_do(compare, status):
    [finding] = compare(status)
    assert finding.level is Level.BAD
    assert "PD_TRANSFER_VIA_STORAGE=1" in finding.remedy
    assert "VLLM_PLUGINS is unset or names pdstore" in finding.remedy


@pytest.mark.misconfiguration("an address, as a Service's, that leads to P and to D")
def test_an_address_that_leads_to_p_and_to_d_is_red(compare):
    """The selector of a Service may have a label of both."""
    status = status_of() | {"role": "prefill"}
    turns = itertools.cycle(["prefill", "prefill", "decode"])
    [wrong] = found_wrong(compare(lambda: status | {"role": next(turns)}, status))
    assert wrong.said.endswith("of role prefill, and then to one of role decode")
    assert "a Service whose selector" in wrong.remedy


@contextlib.contextmanager
def api_of(namespace="00", store="redis://r:6379", pools=("aa" * 16,), fmt=1):
    """Serves the metrics of an instance as its API does; its pool has had these ids in turn.

    namespace: None for an instance before its first request.
    """
    metrics, known = Metrics(), iter(pools)
    current = [None]
    if namespace is not None:
        metrics.set_info(fmt, "prefill", namespace, store, lambda: current[0])
    for pool in known:
        current[0] = bytes.fromhex(pool)
        metrics.refresh()
    server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_instance_with_metrics_alone_is_compared_by_its_digest():
    with (
        instance(status_of()) as first,
        api_of("00", "redis://a") as equal,
        api_of("bb", "redis://b") as other,
    ):
        found = list(check_peers([first, equal, other]))
    assert [f.subject for f in found if f.level is Level.OK] == ["pool", "namespace", "pool"]
    [wrong] = found_wrong(found)
    assert wrong.subject == "namespace"
    assert "D's log names the field" in wrong.remedy
    assert "ssh -N -L 8301:127.0.0.1:ITS_PORT HOST" in wrong.remedy  # the page is of one host


def test_an_instance_that_answered_no_request_is_to_be_sent_one():
    with api_of() as p, api_of(None) as d:
        [wrong] = found_wrong(check_peers([p, d]))
    assert (wrong.subject, wrong.remedy) == (f"peer {d}", "send it one, then ask again")
    assert wrong.said.startswith("it has answered no request yet")


def test_two_formats_of_apis_are_two_versions_of_pdstore():
    with api_of("00") as p, api_of("bb", fmt=2) as d:
        [wrong] = found_wrong(check_peers([p, d]))
    assert (wrong.subject, wrong.said) == ("namespace: format", f"1 at {p}, 2 at {d}")
    assert wrong.remedy.startswith("install the same version of pdstore for both")


@pytest.mark.parametrize(
    ("stores", "remedy"),
    [
        (("redis://r:6379/0", "redis://r:6379/1"), "give both the same PDSTORE_STORE"),
        (("redis://r:6379", "redis://r:6379"), "a Service with two servers behind it"),
        (("shm://pool", "shm://pool"), "run both as one user, with one /dev/shm"),
        (("file:///pool", "file:///pool"), "in a container: mount it"),
    ],
)
def test_two_pools_are_red_by_the_apis_alone_as_on_two_hosts(stores, remedy):
    with api_of(store=stores[0]) as p, api_of(store=stores[1], pools=("bb" * 16,)) as d:
        [wrong] = found_wrong(check_peers([p, d]))
    assert wrong.subject == "pool"
    assert f"aaaaaaaa ({stores[0]}) at {p}" in wrong.said
    assert f"bbbbbbbb ({stores[1]}) at {d}" in wrong.said
    assert remedy in wrong.remedy


def test_the_pool_that_an_instance_has_now_is_compared_not_the_one_before():
    with api_of(pools=("aa" * 16, "bb" * 16)) as p, api_of(pools=("bb" * 16,)) as d:
        found = list(check_peers([p, d]))
    assert [f.subject for f in found if f.level is Level.OK] == ["pool", "namespace"]
    assert not found_wrong(found)


def test_an_instance_that_does_not_know_its_pool_yet_is_compared_by_its_store():
    with (
        api_of(store="redis://a") as p,
        api_of(store="redis://b", pools=()) as d,
        api_of(store="redis://a", pools=()) as alike,
    ):
        [finding] = [f for f in check_peers([p, d]) if f.level is Level.WARN]
        assert "its store is redis://b, the other's redis://a" in finding.said
        [finding] = [f for f in check_peers([p, alike]) if f.subject == "pool"]
    assert (finding.level, finding.said.partition(":")[0]) == (Level.INFO, "not compared")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n"])
def test_a_peer_that_trickles_its_answer_is_not_waited_for_without_end(head):
    """Bytes come often enough for any limit of one read: of its headers, or of its body."""
    is_over = threading.Event()

    class Trickling(socketserver.StreamRequestHandler):
        def handle(self):
            self.wfile.write(head)
            with contextlib.suppress(OSError):
                while not is_over.wait(0.05):
                    self.wfile.write(b" ")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Trickling) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        start = time.monotonic()
        [finding] = check_peers([f"http://127.0.0.1:{server.server_address[1]}"], timeout_s=0.5)
        took_s = time.monotonic() - start
        is_over.set()
        server.shutdown()
        thread.join()
    assert finding.level is Level.BAD
    assert finding.said == "no answer: its answer did not arrive within 0.5 s"
    assert took_s < 20


@pytest.mark.misconfiguration("a `--peer` that does not answer, or is no URL")
def test_nobody_there_is_red_in_plain_words():
    [finding] = check_peers(["http://127.0.0.1:9"])
    assert finding.level is Level.BAD
    assert finding.said == "no answer: Connection refused"
    assert finding.remedy.startswith("start it (PDSTORE_STATUS_PORT opens such a port)")


@pytest.mark.misconfiguration("an instance listens on 127.0.0.1 alone, and `--peer` names its host")
def test_nobody_at_an_address_of_another_host_may_listen_on_its_own_alone():
    [finding] = check_peers(["http://127.0.0.2:9"])
    assert finding.said == "no answer: Connection refused"
    assert "check that it listens on this address (--host 0.0.0.0)" in finding.remedy


@pytest.mark.misconfiguration("a `--peer` of `https://`, and the instance speaks http")
def test_https_to_an_instance_that_speaks_http_says_what_to_write():
    with instance(status_of()) as url:
        [finding] = check_peers([url.replace("http:", "https:")])
    assert finding.level is Level.BAD
    assert finding.remedy == f"it speaks http: write {url}"


def test_http_to_a_server_that_ends_the_connection_may_have_to_be_https():
    class Ending(socketserver.BaseRequestHandler):  # as uvicorn with TLS does
        def handle(self):
            self.request.recv(1000)

    with socketserver.TCPServer(("127.0.0.1", 0), Ending) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        place = f"127.0.0.1:{server.server_address[1]}"
        [finding] = check_peers([f"http://{place}"])
        server.shutdown()
        thread.join()
    assert finding.remedy == f"if it speaks TLS, write https://{place}"


@pytest.mark.misconfiguration("a `--peer` that does not answer, or is no URL")
@pytest.mark.parametrize("url", ["127.0.0.1:8100", "localhost", "ftp://127.0.0.1:1"])
def test_what_is_no_url_says_how_one_begins(url):
    [finding] = check_peers([url])
    assert finding.said.startswith("a URL begins with http://")
