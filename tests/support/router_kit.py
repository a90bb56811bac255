"""A router over real HTTP in front of small fake instances."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pdstore.router.app import Options, make_app
from pdstore.router.intake import TimedProtocol

DEADLINE_S = 30
PARAMS = {"pdstore": {"attempt": "ab" * 16, "num_tokens": 7}}
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 9}


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def url_of(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


class Servers:
    """Apps behind real sockets, on the loop of the test; they stop together."""

    def __init__(self, group: anyio.abc.TaskGroup, stack: contextlib.ExitStack) -> None:
        self.group, self.stack = group, stack
        self.running: list[_Server] = []

    def start(self, app: Any, **more: Any) -> str:
        """Serves an app; returns its URL."""
        sock = self.stack.enter_context(listening())
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, **more)
        self.running.append(_Server(config))
        self.group.start_soon(self.running[-1].serve, [sock])
        return url_of(sock)

    def stop(self) -> None:
        for server in self.running:
            server.should_exit = True


@contextlib.contextmanager
def nobody() -> Any:
    """Yields a URL where connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield url_of(sock)


Reply = Callable[[dict[str, Any]], Awaitable[Response]]


class Fake:
    """An instance that keeps what it was asked and answers what the test says.

    probed: answers /health and /v1/models instead of the usual answers.
    """

    def __init__(self, reply: Reply | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.health_body: dict[str, str] | None = None
        self.probed: Reply | None = None
        self.reply = reply or says({"id": "x"})
        self.was_cancelled = anyio.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ]
        )

    async def complete(self, request: Request) -> Any:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        return Cancellable(self, await self.reply(self.bodies[-1]))

    async def models(self, request: Request) -> Response:
        if self.probed is not None:
            return await self.probed({})
        return JSONResponse({"data": [{"id": "m"}]})

    async def health(self, request: Request) -> Response:
        if self.probed is not None:
            return await self.probed({})
        if self.health_body is not None:
            return JSONResponse(self.health_body)
        return PlainTextResponse("")


class Cancellable:
    """A response that tells its Fake when its client left before the end."""

    def __init__(self, fake: Fake, response: Response) -> None:
        self.fake, self.response = fake, response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self.watch, receive, group.cancel_scope)
            await self.response(scope, receive, send)
            group.cancel_scope.cancel()

    async def watch(self, receive: Any, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fake.was_cancelled.set()
        scope.cancel()


def says(content: Any, status: int = 200) -> Reply:
    async def reply(body: dict[str, Any]) -> Response:
        return JSONResponse(content, status)

    return reply


def streams(source: Callable[[], AsyncIterator[bytes]]) -> Reply:
    async def reply(body: dict[str, Any]) -> Response:
        return StreamingResponse(source(), media_type="text/event-stream")

    return reply


async def never() -> AsyncIterator[bytes]:
    await anyio.sleep_forever()
    yield b""


async def trickle() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await anyio.sleep(0.05)


async def without_end() -> AsyncIterator[bytes]:
    while True:
        yield b" " * (1 << 20)
        await anyio.sleep(0)  # nothing waits where the client has gone


@contextlib.asynccontextmanager
async def routed(
    prefills: list[Fake | str], decodes: list[Fake | str], provider: Any = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a router in front of these instances (a string is the URL of one)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(anyio.fail_after(DEADLINE_S))
        async with anyio.create_task_group() as group:
            servers = Servers(group, stack)

            def urls(fakes: list[Fake | str]) -> tuple[str, ...]:
                return tuple(f if isinstance(f, str) else servers.start(f.app) for f in fakes)

            given = Options(urls(prefills), urls(decodes), **options)
            url = servers.start(
                make_app(given, provider), http=partial(TimedProtocol, given.limits)
            )
            try:
                # the deadline above is the only one: httpx's own would end a busy machine's answers
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as client:
                    yield client
            finally:
                servers.stop()


async def metric(client: httpx.AsyncClient, line: str) -> float:
    """Returns the sum of the samples that begin so."""
    text = (await client.get("/metrics")).text
    return sum(float(row.split()[-1]) for row in text.splitlines() if row.startswith(line))
