"""The router's HTTP interface."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.router.bodies import Json
from examples.router.calls import Asked, Calls, Refusal
from examples.router.counts import Counts
from examples.router.exchange import ConcurrentExchange, Exchange
from examples.router.upstreams import Rotation, Upstream

Mode = Literal["relay", "concurrent"]

CONNECT_S = 2.0
_PROBE_S = 2.0
# Shorter than a server's own keep-alive (5 s in uvicorn): no call meets a connection just closed.
_KEEPALIVE_S = 2.0


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    mode: Mode = "relay"
    prefill_timeout_s: float = 60.0
    read_timeout_s: float = 600.0


def make_app(options: Options) -> Starlette:
    """The router as an ASGI application."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(options.read_timeout_s, connect=CONNECT_S),
        limits=limits,
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )
    calls = Calls(
        client,
        Rotation("prefill", options.prefill),
        Rotation("decode", options.decode),
        Counts(),
        httpx.Timeout(options.prefill_timeout_s, connect=CONNECT_S),
    )
    exchange = ConcurrentExchange if options.mode == "concurrent" else Exchange
    front = Front(calls, exchange)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(
        routes=[
            Route("/v1/completions", front.complete, methods=["POST"]),
            Route("/v1/chat/completions", front.complete, methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _no_such_thing},
        lifespan=lifespan,
    )


class Front:
    """The endpoints."""

    def __init__(self, calls: Calls, exchange: Callable[[Calls, Asked], Exchange]) -> None:
        self._calls, self._exchange = calls, exchange

    async def complete(self, request: Request) -> Exchange:
        body = _parse(await request.body())
        return self._exchange(self._calls, Asked(request.url.path, body, _headers(request)))

    async def models(self, request: Request) -> Response:
        """What the first instance that answers serves."""
        for upstream in self._calls.decodes.in_turn() + self._calls.prefills.in_turn():
            try:
                answer = await self._calls.client.get(
                    upstream.url + "/v1/models", headers=_headers(request), timeout=_PROBE_S
                )
            except httpx.TransportError:
                upstream.went_down()
                continue
            return Response(answer.content, answer.status_code, media_type="application/json")
        raise Refusal.of(503, "no instance can be reached")

    async def health(self, request: Request) -> Response:
        """200 while a D can answer; `degraded` when every prompt would be computed there."""
        upstreams = self._calls.prefills.upstreams + self._calls.decodes.upstreams
        errors: dict[str, str | None] = {}
        async with anyio.create_task_group() as group:
            for upstream in upstreams:
                group.start_soon(self._probe, upstream, errors)
        alive = {upstream.role for upstream in upstreams if errors[upstream.url] is None}
        status = "down" if "decode" not in alive else "ok" if "prefill" in alive else "degraded"
        states = [
            {"url": u.url, "role": u.role, "ok": errors[u.url] is None, "error": errors[u.url]}
            for u in upstreams
        ]
        code = 503 if status == "down" else 200
        return JSONResponse({"status": status, "upstreams": states}, code)

    async def metrics(self, request: Request) -> Response:
        return Response(self._calls.counts.text(), media_type="text/plain; version=0.0.4")

    async def _probe(self, upstream: Upstream, errors: dict[str, str | None]) -> None:
        try:
            answer = await self._calls.client.get(upstream.url + "/health", timeout=_PROBE_S)
        except httpx.TransportError as error:
            upstream.went_down()
            errors[upstream.url] = repr(error)
            return
        upstream.came_back()
        errors[upstream.url] = None if answer.is_success else f"HTTP {answer.status_code}"


def _parse(raw: bytes) -> Json:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise Refusal.of(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal.of(400, "the body is not a JSON object")
    return body


def _headers(request: Request) -> dict[str, str]:
    """The headers that go on to the instances: one request id for both, and the client's key."""
    headers = {"x-request-id": request.headers.get("x-request-id") or uuid.uuid4().hex}
    if "authorization" in request.headers:
        headers["authorization"] = request.headers["authorization"]
    return headers


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return Response(error.body, error.status, media_type=error.media_type)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal.of(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    return await _refused(request, refusal)
