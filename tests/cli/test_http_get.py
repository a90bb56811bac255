"""http_get: an answer that never ends, in bytes or in time, ends with an error that says so."""

from __future__ import annotations

import contextlib
import http.client
import os
import socketserver
import time
from functools import partial

import pytest

from pdstore.cli.checks.finding import Level
from pdstore.cli.checks.peer import check_peers
from pdstore.cli.http_get import MOST_BYTES, http_get
from pdstore.cli.live import top_once
from pdstore.errors import ConfigError
from pdstore.testing.threads import start_background

HEAD = b"HTTP/1.1 200 OK\r\n"
SOON_S = 30.0  # on a busy machine; unbounded, a read would take for ever


@pytest.fixture
def serve():
    """Starts servers that send bytes and hang up: `serve(b"...")`; a function yields the bytes."""
    with contextlib.ExitStack() as stack:

        def serve(pieces):
            class Handler(socketserver.StreamRequestHandler):
                def handle(self):
                    with contextlib.suppress(OSError):  # the client has enough
                        while self.rfile.readline().strip():
                            pass
                        for piece in pieces():
                            self.wfile.write(piece)

            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler))
            end = start_background(partial(server.serve_forever, 0.01))
            stack.callback(end, 10)
            stack.callback(server.shutdown)
            return "http://{}:{}".format(*server.server_address)

        yield serve


def endless():
    yield HEAD + b"\r\n"
    while True:
        yield b"# more\n" * 8192


def slow(first: bytes, piece: bytes):
    def pieces():
        yield first
        while True:
            time.sleep(0.02)
            yield piece

    return pieces


@pytest.mark.parametrize(
    "head", [b"", b"Content-Length: %d\r\n" % MOST_BYTES, b"Transfer-Encoding: chunked\r\n"]
)
def test_a_body_of_the_most_bytes_is_whole(serve, head):
    body = os.urandom(MOST_BYTES)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in head else body
    assert http_get(serve(lambda: [HEAD, head, b"\r\n", sent]), SOON_S) == body


def test_a_body_without_an_end_is_an_error_with_the_bound(serve):
    with pytest.raises(OSError, match="longer than 4 MiB: is the port right"):
        http_get(serve(endless), SOON_S)


@pytest.mark.parametrize("length", [b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_body_that_ends_too_early_is_no_answer(serve, length):
    with pytest.raises(http.client.IncompleteRead):
        http_get(serve(lambda: [HEAD, length, b"\r\n9\r\n"]), SOON_S)


@pytest.mark.parametrize(
    "pieces",
    [
        slow(b"HTTP/1.1 200 O", b"K"),
        slow(HEAD, b"X: y\r\n"),
        slow(HEAD + b"\r\n", b"#"),
        slow(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n#\r\n"),
    ],
    ids=["status line", "headers", "body", "chunks"],
)
def test_an_answer_that_trickles_ends_at_its_time(serve, pieces):
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        http_get(serve(pieces), 0.2)
    assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize("url", ["file:///etc/hosts", "nothing"])
def test_a_url_of_something_else_is_refused(url):
    with pytest.raises(ConfigError, match="a URL begins with http://"):
        http_get(url, 1.0)


def test_top_and_the_doctor_end_at_a_server_that_sends_for_ever(serve):
    url = serve(endless)
    [finding] = check_peers([url])
    assert finding.level is Level.WARN
    assert "longer than 4 MiB" in finding.said
    answer = top_once([url])
    assert answer.status == 1
    assert "longer than 4 MiB" in answer.document["instances"][0]["error"]
