"""Options, the library's import, and the master's listings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode

import pytest

from examples.ports import free_ports
from pdstore.errors import ConfigError, MissingExtra, StoreUnavailable
from pdstore.settings import Settings, parse_size
from pdstore.store import open_store
from pdstore.store.connect import check_url
from pdstore.store.mooncake import library as mooncake_library
from pdstore.store.mooncake.library import MooncakeConfig
from pdstore.store.url import StoreURL
from pdstore.testing.values import start_background


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if "MOONCAKE_" in name:
            monkeypatch.delenv(name)


def config(url):
    return MooncakeConfig.from_url(StoreURL.of(url))


def test_every_option_of_the_url():
    as_written = {"devices": "mlx5_0,mlx5_1", "prefer": "h:1", "tenant": "t"}
    as_written |= {"metadata": "http://m:8080/metadata", "hostname": "10.0.0.2"}
    as_written |= {"ssd_path": "/nvme", "metrics_port": 9004, "connections": 4, "lease": 2.5}
    others = "topology=Embedded&segment=4GB&buffer=1mb&protocol=TCP"
    found = config(f"mooncake://m:1?{others}&{urlencode(as_written)}")
    read = {"topology": "embedded", "segment": 4 << 30, "buffer": 1 << 20, "protocol": "tcp"}
    assert found.model_dump() == {"master": "m:1", **read, **as_written}


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        *((7, 7), (1.5e9, 1_500_000_000), ("7", 7), ("7b", 7), ("2k", 2 << 10), ("4gb", 4 << 30)),
        *(("512 MiB", 512 << 20), (" 1.5G ", 3 << 29), ("1TB", 1 << 40)),
    ],
)
def test_a_size_is_bytes_or_has_a_unit_of_1024(value, num_bytes):
    assert parse_size(value, unit=1024) == num_bytes


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("mooncake://m:1?segmnet=4GB", "did you mean 'segment'"),
        ("mooncake://m:1?zzzz=1", "known: .*segment"),
        ("mooncake://m:1/path", "write mooncake://HOST:PORT"),
        ("mooncake://", "set MOONCAKE_MASTER=HOST:PORT, or MOONCAKE_CONFIG_PATH"),
        ("mooncake://m:1?topology=both", "'holder' or 'embedded'"),
        ("mooncake://m:1?topology=embedded", "segment=4GB"),
        ("mooncake://m:1?segment=4GB", "write topology=embedded"),
        ("mooncake://m:1?segment=much", "bad segment 'much'.* write a size like"),
        ("mooncake://m:1?lease=0", "greater than 0"),
        ("mooncake://m:1?lease=soon", "valid number"),
        ("mooncake://m:1?metrics_port=70000", "less than 65536"),
        ("mooncake://m:1?connections=65", "less than or equal to 64"),
        ("mooncake://m:1?protocol=rdma&connections=2", "needs protocol=tcp"),
    ],
)
def test_a_mistake_is_refused_with_the_remedy(url, hint):
    with pytest.raises(ConfigError, match=hint):
        config(url)


def test_the_librarys_settings_are_made_before_it_is_imported_and_the_users_kept():
    """Rule 7: its own defaults wait 30 s and more."""
    code = (
        "import os, sys\n"
        "from pdstore.store.mooncake import library\n"
        "from pdstore.store.mooncake.library import MooncakeConfig\n"
        "def load():\n"
        "    print({n: v for n, v in os.environ.items() if n.startswith('MC_')})\n"
        "library._load = load\n"
        "library.Library(MooncakeConfig(master='127.0.0.1:1'))\n"
    )
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MC_")}
    environment["MC_RPC_TIMEOUT_MS"] = "123"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    expected = {**mooncake_library.VARIABLES, "MC_RPC_TIMEOUT_MS": "123"}
    assert eval(done.stdout) == {**expected, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'pdstore\[mooncake\]'"),
        (
            ImportError("libcurl.so.4: cannot open shared object file"),
            r"libcurl.so.4.* apt-get install libibverbs1 libcurl4 libnuma1",
        ),
        (ImportError("libcudart.so.12: cannot open"), r"pdstore\[mooncake-cpu\]"),
    ],
)
def test_what_is_not_installed_is_said_with_the_command(monkeypatch, error, words):
    usual = importlib.import_module

    def fail(name):
        if name == "mooncake.store":
            raise error
        return usual(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingExtra, match=words):
        open_store("mooncake://127.0.0.1:1", Settings())


def test_what_is_not_installed_is_said_before_it_is_opened(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[mooncake\]'"):
        check_url("mooncake://localhost", Settings())


@pytest.fixture
def answering(open_double):
    """Opens stores whose master's HTTP server gives these answers: `answering({"/path": b""})`.

    said_bytes: the length that it says; None: it says none.
    """
    with contextlib.ExitStack() as stack:

        def make(answers: dict[str, bytes], said_bytes: int | None = None):
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200)
                    if said_bytes is not None:
                        self.send_header("Content-Length", str(said_bytes))
                    self.end_headers()
                    self.wfile.write(answers[self.path.partition("?")[0]])

                def log_message(self, *args):
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            end = start_background(partial(server.serve_forever, 0.01))
            stack.callback(end, 10)
            stack.callback(server.shutdown)
            return open_double(master="127.0.0.1:1", metrics_port=server.server_port)

        yield make


def test_a_server_that_is_away_is_named_with_its_option(open_double):
    (port,) = free_ports(1)
    store = open_double(master="127.0.0.1:1", metrics_port=port)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} there is no.*metrics_port"):
        list(store.stored_values())


def test_replicas_are_summed_and_values_without_one_left_out(answering):
    body = b"""{"success": true, "data": {
        "pds1:two": {"ok": true, "values": [{"size_": 3, "protocol_": "tcp"}, {"size_": 4}]},
        "pds1:away": {"ok": false, "error": "OBJECT_NOT_FOUND"}, "pds1:begun": {"values": null}}}"""
    keys = b"pds1:two\npds1:away\npds1:begun\nother"
    store = answering({"/get_all_keys": keys, "/batch_query_keys": body})
    assert list(store.stored_values()) == [("pds1:two", 7, None)]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>welcome</html>", b'{"data": {"key": {"val', b"[]", b"{}", b'{"data": null}'),
        *(b'{"data": {"key": []}}', b'{"data": {"key": {"values": [{}]}}}', b"[" * 100_000),
        b'{"data": {"key": {"values": [{"size_": "long"}]}}}',
    ],
)
def test_an_answer_that_is_no_listing_is_named_with_the_option(answering, body):
    store = answering({"/get_all_keys": b"pds1:key", "/batch_query_keys": body})
    with pytest.raises(StoreUnavailable) as caught:
        list(store.stored_values())
    assert "answers, but not as Mooncake's master does" in str(caught.value)
    assert "?metrics_port=" in str(caught.value)
    assert len(str(caught.value)) < 400
