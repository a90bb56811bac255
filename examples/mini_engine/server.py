"""OpenAI-compatible HTTP in front of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import FrameType

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.mini_engine.answer import Answer, answer_of
from examples.mini_engine.engine import Engine, EngineError
from examples.mini_engine.openai_types import AnyAnswer, ServedModel, json_of
from examples.mini_engine.prompt import prompt_of
from examples.mini_engine.protocol import Body, ChatBody, RefusedError
from examples.mini_engine.request import Finish, Request, Token

Events = asyncio.Queue[Token | Finish]

_MAX_BODY_BYTES = 64 << 20


def app_of(engine: Engine) -> Starlette:
    """Returns the ASGI application; its end stops the engine."""
    handlers = Handlers(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.stop)

    return Starlette(
        routes=[
            Route("/v1/completions", handlers.completions, methods=["POST"]),
            Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
            Route("/v1/models", handlers.models),
            Route("/health", handlers.health),
            Route("/metrics", handlers.metrics),
        ],
        exception_handlers={
            RefusedError: _refuse,
            HTTPException: _refuse,
            ClientDisconnect: _client_left,
        },
        lifespan=lifespan,
    )


class HttpServer(uvicorn.Server):
    """Runs the application. A signal drains the engine first, so that requests can end well."""

    def __init__(self, engine: Engine) -> None:
        self._engine, config = engine, engine.config
        options = uvicorn.Config(app_of(engine), config.host, config.port, log_level="warning")
        options.timeout_graceful_shutdown = math.ceil(config.settings.drain_s) + 1
        super().__init__(options)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            config = self._engine.config
            role = config.settings.role
            print(f"ready: {role} on http://{config.host}:{config.port}", file=sys.stderr)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.drain()
        super().handle_exit(sig, frame)


class Handlers:
    """The handlers of one engine's interface."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = engine.model
        self._name = engine.config.name
        self._started_at = int(time.time())

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, Body.of(await _read(http)))

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, ChatBody.of(await _read(http)))

    async def _answer(self, http: HttpRequest, body: Body | ChatBody) -> Response:
        events: Events = asyncio.Queue()
        request = self._request_of(body, _sink_of(events))
        request.id = http.headers.get("x-request-id") or uuid.uuid4().hex
        request.traceparent = http.headers.get("traceparent")
        answer = answer_of(self._model.tokenizer, self._name, body, request)
        parts = self._parts(request, answer, events)
        async with self._aborting_when_gone(http, request):
            first = await anext(parts)  # an error before the first token gets its status
        if body.stream:
            return StreamingResponse(_sse(first, parts), media_type="text/event-stream")
        await parts.aclose()
        return Response(json_of(first), media_type="application/json")

    async def models(self, http: HttpRequest) -> Response:
        model = ServedModel(
            id=self._name,
            object="model",
            created=self._started_at,
            owned_by="pdstore",
            max_model_len=self._model.max_model_len,
        )
        return JSONResponse({"object": "list", "data": [model.model_dump(exclude_unset=True)]})

    async def health(self, http: HttpRequest) -> Response:
        """Returns 503 when no request can be answered; `degraded` if only the pool has trouble."""
        error, problem = self._engine.error, self._engine.problem
        if error is not None:
            return JSONResponse({"status": "dead", "error": error}, 503)
        if problem is not None:
            return JSONResponse({"status": "degraded", "reason": problem})
        return JSONResponse({"status": "ok"})

    async def metrics(self, http: HttpRequest) -> Response:
        text = generate_latest(self._engine.counters.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _request_of(self, body: Body | ChatBody, sink: Callable[[Token | Finish], None]) -> Request:
        """Returns a body's request. Raises RefusedError if the engine can never answer it."""
        if body.model not in (None, self._name):
            message = (
                f"the model {body.model!r} does not exist: this is {self._name!r}"
                " (--served-model-name)"
            )
            raise RefusedError(message, status=404, param="model", code="model_not_found")
        prompt = prompt_of(self._model.tokenizer, body)
        if not prompt:  # nothing would ever be computed
            raise RefusedError("the prompt has no tokens", param="prompt")
        if not all(0 <= token < self._model.vocab_size for token in prompt):
            message = f"prompt: a token id is not in [0, {self._model.vocab_size})"
            raise RefusedError(message, param="prompt")
        request = Request(
            token_ids=prompt,
            max_tokens=body.max_tokens or self._engine.room_behind(len(prompt)),
            sink=sink,
            ignore_eos=bool(body.ignore_eos),
            num_logprobs=body.num_logprobs,
            kv_transfer_params=body.kv_transfer_params,
        )
        try:
            self._engine.check(request)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        return request

    async def _parts(
        self, request: Request, answer: Answer, events: Events
    ) -> AsyncGenerator[AnyAnswer, None]:
        """Submits a request and yields its answer in parts; closing it early aborts the request."""
        try:
            self._engine.submit(request)
            while True:
                event = await events.get()
                if isinstance(event, Token):
                    answer.add(event)
                    if answer.is_stream:
                        yield answer.part()
                elif event.error is not None:
                    raise self._error_of(event)
                else:
                    break
            for part in answer.end(event.reason):
                yield part
        except EngineError as error:
            raise RefusedError(str(error), status=503) from error
        finally:
            self._engine.abort(request)

    def _error_of(self, finish: Finish) -> RefusedError:
        """Returns the answer to a request that ended with an error: 502 if P's KV did not come."""
        status = 503 if self._engine.error else 502 if finish.code else 500
        return RefusedError(finish.error or "", status=status, code=finish.code)

    @contextlib.asynccontextmanager
    async def _aborting_when_gone(self, http: HttpRequest, request: Request) -> AsyncIterator[None]:
        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self._engine.abort(request)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


def _sink_of(events: Events) -> Callable[[Token | Finish], None]:
    """Returns a sink that hands events from the engine's thread to this event loop."""
    loop = asyncio.get_running_loop()

    def sink(event: Token | Finish) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(events.put_nowait, event)

    return sink


async def _sse(first: AnyAnswer, parts: AsyncGenerator[AnyAnswer, None]) -> AsyncIterator[str]:
    """Yields server-sent events. An error comes as the last event before [DONE]."""
    try:
        yield f"data: {json_of(first)}\n\n"
        async for part in parts:
            yield f"data: {json_of(part)}\n\n"
    except RefusedError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RefusedError(error.detail, status=error.status_code)
    assert isinstance(error, RefusedError)
    return JSONResponse(error.body, error.status)


async def _client_left(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _read(http: HttpRequest) -> bytes:
    """Returns a request's body. Raises RefusedError (413) for one that no prompt can need."""
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RefusedError(f"the body is longer than {_MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)
