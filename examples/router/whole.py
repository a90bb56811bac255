"""Whole answers of instances: each exchange has one deadline and one size.

httpx bounds each read, so that a peer which sends a byte now and then would be waited for without
end, and it bounds no size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import httpx

from examples.router.open_answer import close

CONNECT_S = 2.0
MOST_BYTES = 64 << 20
"""Bytes that an answer which the router keeps may have; the log-probabilities of a long prompt are
the largest part of P's."""
PROBE_S = 2.5
PROBE_BYTES = 4 << 20
"""The limits of small questions: /health, /v1/models."""


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
    client: httpx.AsyncClient, request: httpx.Request, within_s: float, most_bytes: int = MOST_BYTES
) -> WholeAnswer:
    """Returns the answer to a request, all of it.

    Raises httpx.TransportError: ConnectError or ConnectTimeout if the instance cannot be reached,
    ReadTimeout if the answer was not whole in `within_s` seconds, TooLong.
    """
    timeout = httpx.Timeout(within_s, connect=min(CONNECT_S, within_s))
    request.extensions["timeout"] = timeout.as_dict()
    try:
        with anyio.fail_after(within_s):
            answer = await client.send(request, stream=True)
            try:
                content = await gather(answer.aiter_bytes(), most_bytes)
            except httpx.DecodingError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            finally:
                await close(answer)
    except (TimeoutError, httpx.ReadTimeout) as error:
        raise httpx.ReadTimeout(f"no whole answer in {within_s:g} s") from error
    media_type = answer.headers.get("content-type", "application/json")
    return WholeAnswer(answer.status_code, content, media_type)


async def gather(chunks: AsyncIterator[bytes], most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the chunks of a body as one. Raises TooLong."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most_bytes:
            raise TooLong(f"an answer of more than {most_bytes} bytes")
    return bytes(body)
