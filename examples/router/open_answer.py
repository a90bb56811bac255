"""OpenAnswer: an answer that is on its way to the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio
import httpx

from pdstore.errors import Reason

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
    def of(cls, status: int, headers: Headers, body: bytes) -> OpenAnswer:
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
