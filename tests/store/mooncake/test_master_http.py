"""MasterHttp: the master's own listing; a server that is away or another one is named."""

from __future__ import annotations

import contextlib
import socketserver
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.ports import free_ports
from pdstore.errors import StoreUnavailable
from pdstore.store.mooncake.master_http import MOST_BYTES, MasterHttp
from pdstore.testing.threads import start_background


def test_a_server_that_is_away_is_named_with_its_option():
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} does not answer.*metrics_port"):
        MasterHttp("mooncake://here", f"127.0.0.1:{port}").all_keys()


class Other(socketserver.StreamRequestHandler):
    """A server that speaks no HTTP."""

    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"\x00\x01 who are you?\r\n\r\n")


def test_a_server_that_speaks_something_else_is_named_too():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        end = start_background(partial(server.serve_forever, 0.01))
        _, port = server.server_address
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} does not answer"):
            MasterHttp("mooncake://here", f"127.0.0.1:{port}").gauges()
        server.shutdown()
        end(10)


@contextlib.contextmanager
def answering(body: bytes, said_bytes: int | None = None, **limits: int):
    """A MasterHttp whose server answers every request with this body.

    said_bytes: the length that it says; None: it says none.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            if said_bytes is not None:
                self.send_header("Content-Length", str(said_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        end = start_background(partial(server.serve_forever, 0.01))
        yield MasterHttp("mooncake://here", f"127.0.0.1:{server.server_port}", **limits)
        server.shutdown()
        end(10)


def test_replicas_are_summed_and_values_without_one_left_out():
    body = b"""{"success": true, "data": {
        "two": {"ok": true, "values": [{"size_": 3, "protocol_": "tcp"}, {"size_": 4}]},
        "away": {"ok": false, "error": "OBJECT_NOT_FOUND"}, "begun": {"values": null}}}"""
    with answering(body) as http:
        assert list(http.sizes(["two", "away", "begun"])) == [("two", 7)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>welcome</html>",
        b'{"data": {"key": {"val',
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"data": {"key": []}}',
        b'{"data": {"key": {"values": [{}]}}}',
        b'{"data": {"key": {"values": [{"size_": "long"}]}}}',
        b"[" * 100_000,
    ],
)
def test_an_answer_that_is_no_listing_is_named_with_the_option(body):
    with answering(body) as http, pytest.raises(StoreUnavailable) as caught:
        list(http.sizes(["key"]))
    assert "answers, but not as Mooncake's master does" in str(caught.value)
    assert "?metrics_port=" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_only_lines_of_a_name_and_a_number_are_gauges():
    with answering(b'whole 12\nexponent 1.5e+09\nversion 1.2.3\nlabels{a="b"} 1\ne e\n') as http:
        assert http.gauges() == {"whole": 12.0, "exponent": 1.5e9}


@pytest.mark.parametrize("said_bytes", [None, 1 << 40])
def test_an_answer_without_end_is_not_read_to_its_end(said_bytes):
    body, why = b"x 1\n" * (MOST_BYTES // 4 + 1), f"more than {MOST_BYTES} bytes.*metrics_port"
    with answering(body, said_bytes) as http, pytest.raises(StoreUnavailable, match=why):
        http.gauges()


def test_keys_have_a_bound_of_their_own():
    with answering(b"one two", most_key_bytes=7) as http:
        assert http.all_keys() == ["one", "two"]
    with answering(b"one two ", most_key_bytes=7) as http, pytest.raises(StoreUnavailable):
        http.all_keys()


def test_keys_of_which_some_are_missing_are_no_listing():
    with answering(b"one two", said_bytes=11) as http, pytest.raises(StoreUnavailable):
        http.all_keys()
