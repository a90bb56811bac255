"""Reads client requests, bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import anyio
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdstore.router.bodies import Json, Refusal, encode_field, parse

MAX_REQUEST_ID_CHARS = 256
_PASSED_ON = ("authorization", "traceparent", "tracestate")


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes of its body, and seconds until its body, or its headers, came."""

    body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    header_timeout_s: float = 30.0


@dataclass(frozen=True)
class Asked:
    """One client request: its path, its body, and the headers that go to P and D alike.

    prompt_ids: a chat's prompt in token ids, which D takes instead of making one of the messages.
    """

    path: str
    body: Json
    headers: Mapping[str, str]
    prompt_ids: list[int] | None = None

    @property
    def has_several_prompts(self) -> bool:
        """True if one hand-off cannot stand for all: P answers with that of the first prompt."""
        prompt = self.body.get("prompt")
        return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)

    @cached_property
    def prompt_field(self) -> bytes:
        """The body's prompt as JSON, which P's and D's requests share. Raises ValueError.

        Making it of 32,768 token ids takes 2.5 ms, for which D's request need not wait then.
        """
        return encode_field(self.body, "prompt")

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]


async def read(request: Request, limits: Limits) -> Asked:
    """Returns what the client asks.

    Raises Refusal: 400 for a body that is not a JSON object and for odd headers, 408 for a body
    that is late, 413 for one that is too long.
    """
    headers = passed_headers(request)
    raw = await _body(request, limits)
    try:
        return Asked(request.url.path, parse(raw), headers)
    except ValueError as error:
        raise Refusal.saying(400, f"the body cannot be used: {error}") from error


def passed_headers(request: Request) -> dict[str, str]:
    """Returns the headers that go on: one request id for P and D, the client's key and its trace.

    Raises Refusal (400) for a value that HTTP clients could not send or logs could not show.
    """
    headers = {"x-request-id": request.headers.get("x-request-id") or uuid.uuid4().hex}
    headers |= {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise Refusal.saying(400, f"the header {name} must be printable ASCII")
    if len(headers["x-request-id"]) > MAX_REQUEST_ID_CHARS:
        raise Refusal.saying(400, f"x-request-id is longer than {MAX_REQUEST_ID_CHARS} characters")
    return headers


async def _body(request: Request, limits: Limits) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise _too_long(limits)
    body = bytearray()
    try:
        with anyio.fail_after(limits.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_long(limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise Refusal.saying(408, message) from None
    return bytes(body)


def _too_long(limits: Limits) -> Refusal:
    return Refusal.saying(413, f"the body is longer than {limits.body_bytes} bytes")


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also ends a connection whose next request's headers are late.

    uvicorn bounds only the silence between two requests, so that a client which sends a byte now
    and then, or none at all, keeps its connection.
    """

    def __init__(self, limits: Limits, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._header_timeout_s = limits.header_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_headers(self) -> None:
        """Keeps one timer from the first byte of a request until its headers are complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout_s, self._cut)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            body = Refusal.saying(
                408, f"the headers did not arrive within {self._header_timeout_s:g} s"
            ).body
            head = f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\n" + head + body)
        self.transport.close()
