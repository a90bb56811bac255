"""The router's HTTP interface."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio
import httpx
from anyio.from_thread import BlockingPortal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pdstore.router import intake
from pdstore.router.answers import CONNECT_TIMEOUT_S, PROBE_BYTES, PROBE_TIMEOUT_S, ask
from pdstore.router.bodies import Refusal
from pdstore.router.calls import Calls
from pdstore.router.counts import CountedApp, Counts
from pdstore.router.exchange import AloneExchange, ConcurrentExchange, Exchange
from pdstore.router.health import RouterStatus, check
from pdstore.router.intake import Asked, Limits
from pdstore.router.spliced_exchange import SplicedExchange
from pdstore.router.upstreams import Rotation
from pdstore.status.server import StatusServer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Mode = Literal["relay", "concurrent"]
FirstTokenOf = Literal["prefill", "decode"]

log = logging.getLogger("router")

_SERVED = ("/v1/completions", "/v1/chat/completions")
# Shorter than a server's own keep-alive (5 s in uvicorn): no call meets a connection just closed.
_KEEPALIVE_S = 2.0
_RETRIES = 2  # at once, and after half a second


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    mode: Mode = "relay"
    by_prefix: bool = False
    first_token: FirstTokenOf = "decode"
    retries: int = 0
    prefill_timeout_s: float = 60.0
    read_timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    status_port: int | None = None


def make_app(options: Options, provider: TracerProvider | None = None) -> ASGIApp:
    """Returns the router as an ASGI application.

    provider: makes the spans of requests and calls; None for none. The application closes it.
    """
    client = _client_of(options)
    counts = Counts()
    calls = _calls_of(options, client, counts)
    shown = RouterStatus(options, calls)
    status = _open_status(options.status_port, shown)
    front = Front(calls, partial(_exchange_of(options), retries=options.retries), options.limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client, BlockingPortal() as shown.portal:
            yield
            if status is not None:
                await anyio.to_thread.run_sync(status.close)
        if provider is not None:
            await anyio.to_thread.run_sync(provider.shutdown)

    app = Starlette(
        routes=[
            *(Route(path, front.complete, methods=["POST"]) for path in _SERVED),
            Route("/v1/models", front.models),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_such_thing,
            Exception: _failed,  # Starlette raises it again, for the server's log
        },
        lifespan=lifespan,
    )
    counted = CountedApp(app, counts)
    return counted if provider is None else traced(counted, client, provider)


def _calls_of(options: Options, client: httpx.AsyncClient, counts: Counts) -> Calls:
    """Returns the calls of the instances; warns of one that shall be both P and D."""
    prefills = Rotation("prefill", options.prefill, by_prefix=options.by_prefix)
    decodes = Rotation("decode", options.decode, by_prefix=options.by_prefix)
    for url in {p.url for p in prefills.upstreams} & {d.url for d in decodes.upstreams}:
        log.warning("%s is --prefill and --decode: give each the URL of its own instance", url)
    return Calls(client, prefills, decodes, counts, options.prefill_timeout_s)


def _client_of(options: Options) -> httpx.AsyncClient:
    """Returns the HTTP client of all calls. It connects again to a D that is the only one."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
    transport = partial(httpx.AsyncHTTPTransport, limits=limits, trust_env=False)
    is_alone = len(options.decode) == 1  # else another one is asked
    return httpx.AsyncClient(
        timeout=httpx.Timeout(options.read_timeout_s, connect=CONNECT_TIMEOUT_S),
        transport=transport(),
        mounts={options.decode[0]: transport(retries=_RETRIES)} if is_alone else None,
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )


def _open_status(port: int | None, shown: RouterStatus) -> StatusServer | None:
    """Opens the page about the router. Raises ConfigError for a port that is taken."""
    if port is None:
        return None
    server = StatusServer(port, shown.take, tick=shown.history.add_if_due)
    log.info("status on %s", server.url)
    return server


def _exchange_of(options: Options) -> type[Exchange]:
    if not options.prefill:
        return AloneExchange
    if options.mode == "concurrent":
        return ConcurrentExchange
    return SplicedExchange if options.first_token == "prefill" else Exchange


class Front:
    """The endpoints."""

    def __init__(
        self, calls: Calls, exchange: Callable[[Calls, Asked], Exchange], limits: Limits
    ) -> None:
        self._calls = calls
        self._exchange = exchange
        self._limits = limits

    async def complete(self, request: Request) -> Response | Exchange:
        try:
            asked = await intake.read(request, self._limits)
        except ClientDisconnect:
            self._calls.counts.disconnects.inc()
            return Response(status_code=499)  # nobody reads it
        return self._exchange(self._calls, asked)

    async def models(self, request: Request) -> Response:
        """Returns the list of models of the first instance that answers."""
        headers = intake.passed_headers(request)
        client = self._calls.client
        for upstream in self._calls.decodes.in_turn() + self._calls.prefills.in_turn():
            question = client.build_request("GET", upstream.url + "/v1/models", headers=headers)
            try:
                answer = await ask(client, question, PROBE_TIMEOUT_S, PROBE_BYTES)
            except httpx.TransportError:
                upstream.went_down()
                continue
            return Response(answer.content, answer.status, media_type="application/json")
        raise Refusal.saying(503, "no instance can be reached")

    async def health(self, request: Request) -> Response:
        """Returns 200 while a D can answer; `degraded`, and why, if not all is as it should be."""
        now = await check(self._calls.client, self._calls.upstreams)
        return JSONResponse(now._asdict(), 503 if now.status == "down" else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._calls.counts.text(), media_type="text/plain; version=0.0.4")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return Response(error.body, error.status, media_type=error.media_type)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{error.detail}: {request.method} {request.url.path}"
    words += f"; this router serves {' and '.join(_SERVED)}"
    return await _refused(request, Refusal.saying(error.status_code, words))


async def _failed(request: Request, error: Exception) -> Response:
    refusal = Refusal.saying(500, f"the router failed: {type(error).__name__}; its log says more")
    return await _refused(request, refusal)


def traced(app: ASGIApp, client: httpx.AsyncClient, provider: TracerProvider) -> ASGIApp:
    """Returns the application with a span for each request, and one for each call by the client.

    A request's span continues the client's trace; the spans of P and D continue their calls'.
    """
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

    HTTPXClientInstrumentor.instrument_client(client, tracer_provider=provider)
    return OpenTelemetryMiddleware(
        app,
        excluded_urls="/health,/metrics,/pdstore",
        tracer_provider=provider,
        exclude_spans=["receive", "send"],
    )
