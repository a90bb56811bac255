"""Answers of instances: whole ones, and one that is on its way to the client.

A whole answer is an exchange with one deadline and one size. httpx bounds each read, so that a peer
which sends a byte now and then would be waited for without end, and it bounds no size.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio
import httpx

from pdstore.errors import Reason

CONNECT_TIMEOUT_S = 2.0
MAX_BYTES = 64 << 20
"""Bytes that an answer which the router keeps may have; the log-probabilities of a long prompt are
the largest part of P's."""
PROBE_TIMEOUT_S = 2.5
PROBE_BYTES = 4 << 20
"""The limits of small questions: /health, /v1/models."""


_STOPS = b"cannot schedule new futures after shutdown"
"""In each 500 of a vLLM from SIGTERM until its port closes, seconds later. It has begun nothing,
and its /health says 200 meanwhile."""


class TooLong(httpx.TransportError):
    """More came than the router keeps of an answer."""


@dataclass(frozen=True)
class WholeAnswer:
    """An instance's answer whose body has come: its status, its body, and its content-type."""

    status: int
    content: bytes
    media_type: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


async def ask(
    client: httpx.AsyncClient, request: httpx.Request, timeout_s: float, most_bytes: int = MAX_BYTES
) -> WholeAnswer:
    """Returns the answer to a request, all of it.

    Raises httpx.TransportError: ConnectError or ConnectTimeout if the instance cannot be reached,
    ReadTimeout if the answer was not whole in `timeout_s` seconds, TooLong.
    """
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
    request.extensions["timeout"] = timeout.as_dict()
    try:
        with anyio.fail_after(timeout_s):
            answer = await client.send(request, stream=True)
            try:
                content = await gather(answer.aiter_bytes(), most_bytes)
            except httpx.DecodingError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            finally:
                await close(answer)
    except (TimeoutError, httpx.ReadTimeout) as error:
        raise httpx.ReadTimeout(f"no whole answer in {timeout_s:g} s") from error
    media_type = answer.headers.get("content-type", "application/json")
    return WholeAnswer(_status_of(answer.status_code, content), content, media_type)


async def with_status(answer: httpx.Response) -> httpx.Response:
    """Returns an answer whose body is unread, with the status 503 if its instance is stopping.

    For that the body of a 500 is read, and given again. Raises httpx.TransportError if it breaks.
    """
    if answer.status_code != 500:
        return answer
    try:
        content = await gather(answer.aiter_raw(), PROBE_BYTES)
    finally:
        await close(answer)
    return httpx.Response(
        _status_of(500, content),
        headers=answer.headers,
        stream=httpx.ByteStream(content),
        request=answer.request,
    )


def _status_of(status: int, content: bytes) -> int:
    return 503 if status == 500 and _STOPS in content else status


async def gather(chunks: AsyncIterator[bytes], most_bytes: int = MAX_BYTES) -> bytes:
    """Returns the chunks of a body as one. Raises TooLong."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most_bytes:
            raise TooLong(f"an answer of more than {most_bytes} bytes")
    return bytes(body)


Headers = Sequence[tuple[bytes, bytes]]

_PASSED_ON = (b"content-type", b"content-length", b"content-encoding", b"retry-after")
_FAILED = b"Internal server error"
"""vLLM's whole message where a load failed that must not be computed; its log says why."""


@dataclass(frozen=True)
class OpenAnswer:
    """An answer whose body still comes: a status, headers, and the chunks of the body.

    first: the first chunk, which `chunks` yields too.
    response: an instance's answer that `close` closes; None if the router made this one.
    """

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]
    first: bytes = b""
    response: httpx.Response | None = None

    @classmethod
    def made(cls, status: int, headers: Headers, body: bytes) -> OpenAnswer:
        """Returns an answer with a body that is all there."""
        kept = [(name, value) for name, value in headers if name != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        return cls(status, [*kept, length], _chain(body), body)

    @classmethod
    def of_response(
        cls, response: httpx.Response, first: bytes, others: AsyncIterator[bytes]
    ) -> OpenAnswer:
        """Returns an instance's answer, of which the first chunk has come."""
        raw = [(name.lower(), value) for name, value in response.headers.raw]
        headers = [(name, value) for name, value in raw if name in _PASSED_ON]
        return cls(response.status_code, headers, _chain(first, others), first, response)

    @property
    def lost(self) -> str | None:
        """D's message if it could not use the hand-off and must not compute; None if it could.

        The mini engine answers 502 with the reason of a miss as the error's code; a gateway's 502
        has none. vLLM gives one message to all errors of a request, and in a stream it is the first
        event.
        """
        if self.status == 502:
            return _message_of_miss(self.first)
        is_error = self.status == 500 or self.first.startswith(b'data: {"error"')
        if is_error and _FAILED in self.first:
            return "D could not load what P saved: its log and its metric pdstore_misses say why"
        return None

    async def aclose(self) -> None:
        """Closes the chunks and the response behind them."""
        with anyio.CancelScope(shield=True):
            aclose = getattr(self.chunks, "aclose", None)
            if aclose is not None:
                await aclose()
        if self.response is not None:
            await close(self.response)


async def close(response: httpx.Response) -> None:
    """Closes a response, also in a task that is cancelled."""
    with anyio.CancelScope(shield=True):
        await response.aclose()


async def _chain(first: bytes, others: AsyncIterator[bytes] | None = None) -> AsyncIterator[bytes]:
    yield first
    if others is not None:
        async for chunk in others:
            yield chunk


def _message_of_miss(body: bytes) -> str | None:
    """Returns the message of an error whose code is the reason of a miss; None for any other."""
    try:
        error = json.loads(body)["error"]
        Reason(error["code"])
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return None
