"""MooncakeStore lists by the master's HTTP server; one that is away or another one is named."""

from __future__ import annotations

import contextlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.ports import free_ports
from pdstore.errors import StoreUnavailable
from pdstore.testing.threads import start_background


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


@pytest.mark.parametrize("said_bytes", [None, 1 << 40])
def test_an_answer_without_end_is_not_read_to_its_end(answering, said_bytes):
    store = answering({"/metrics": b"x 1\n" * ((1 << 20) + 1)}, said_bytes)
    with pytest.raises(StoreUnavailable, match=f"more than {4 << 20} bytes.*metrics_port"):
        store.room()
