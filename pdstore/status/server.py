"""StatusServer: `/pdstore` and a page of it, on this host alone."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files

from pdstore.errors import ConfigError
from pdstore.threads import Deadline, Ticker

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # of Host: a page of another site cannot read this one
_TURN_S = 0.2


class StatusServer:
    """Serves the page at `/` and the JSON object that `take` returns at `/pdstore`.

    One thread answers one request after the other: it is for a few people.

    port: 0 for a free one. Raises ConfigError for one that is taken.
    request_s: a client that takes longer to send its request, or to read the answer, is hung up on.
    """

    def __init__(
        self, port: int, take: Callable[[], dict[str, object]], request_s: float = 2.0
    ) -> None:
        page = files("pdstore.status").joinpath("page.html").read_bytes()
        try:
            self._server = _Server((_HOST, port), partial(_Handler, page, take, request_s))
        except OSError as error:
            raise ConfigError(f"PDSTORE_STATUS_PORT={port}: {error}") from error
        self._server.timeout = _TURN_S
        self._longest_turn_s = _TURN_S + 2 * request_s
        self._thread = Ticker("pdstore-status", self._turn)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self._server.server_port}"

    def close(self) -> None:
        """Stops the server. Twice is fine."""
        if self._thread.stop(self._longest_turn_s):
            self._server.server_close()

    def _turn(self) -> float:
        self._server.handle_request()
        return 0.0


class _TimedReader(io.RawIOBase):
    """Reads from a connected socket for `seconds` in all, then raises TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = Deadline(seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left_s = self._deadline.remaining_s()
        if left_s == 0.0:
            raise TimeoutError("the bytes took too long to come")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Server(HTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Logs what a request raised; the base class writes it to stderr."""
        is_gone = isinstance(sys.exc_info()[1], OSError)  # the client is
        log.log(logging.DEBUG if is_gone else logging.ERROR, "a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    def __init__(
        self,
        page: bytes,
        take: Callable[[], dict[str, object]],
        request_s: float,
        *arguments: object,
    ) -> None:
        self._page = page
        self._take = take
        self._request_s = request_s
        super().__init__(*arguments)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_TimedReader(self.connection, self._request_s))

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self.send_error(403, "this page is for this host alone")
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", self._page)
        elif self.path == "/pdstore":
            self._answer("application/json", json.dumps(self._take()).encode())
        else:
            self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: the page asks every second."""

    def _answer(self, kind: str, body: bytes) -> None:
        self.connection.settimeout(self._request_s)
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)
