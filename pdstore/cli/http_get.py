"""http_get: the body that an instance answers to a GET, bounded in bytes and in time."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

from pdstore.cli.quantity import size
from pdstore.errors import ConfigError
from pdstore.status.timed_reader import TimedReader

MOST_BYTES = 4 << 20
"""Of a body; an engine's /metrics has less than a tenth of it."""


def http_get(
    url: str, seconds: float, headers: Mapping[str, str] | None = None, most_bytes: int = MOST_BYTES
) -> bytes:
    """Returns the body at a URL. Follows redirects, uses no proxy.

    seconds: to connect, and then again until the last byte of the answer.
    Raises ConfigError for a URL of something else; ConnectionError or TimeoutError for no answer;
    OSError for an HTTP error or more than `most_bytes`; http.client.HTTPException for what is no
    HTTP, or ends too early.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("a URL begins with http:// or https://")
    # the environment's proxies are for other networks
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http, _Https)
    request = urllib.request.Request(url, headers=headers or {})
    with _plain_errors(), opener.open(request, timeout=seconds) as answer:
        if not isinstance(answer, http.client.HTTPResponse):
            raise ConfigError("it leads to what is neither http:// nor https://")
        body = answer.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise OSError(f"the answer is longer than {size(most_bytes)}: is the port right?")
        if answer.length:
            raise http.client.IncompleteRead(body, answer.length)
        return body


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what urllib puts into `<urlopen error ...>` in its own words."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        reason = error.reason
        raise ConnectionError(getattr(reason, "strerror", None) or str(reason)) from error


class _Answer(http.client.HTTPResponse):
    """An answer that comes within the connection's timeout: the base class has it for each read."""

    def __init__(
        self,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        self.fp.close()
        self.fp = io.BufferedReader(TimedReader(sock, sock.gettimeout() or 0.0))


class _HttpConnection(http.client.HTTPConnection):
    response_class = _Answer


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = _Answer


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, request)
