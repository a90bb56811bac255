"""The router, over real HTTP, in front of small fake instances."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.router.app import Options, make_app
from tests.support.child import child

pytestmark = pytest.mark.anyio

DEADLINE_S = 10
PARAMS = {"pdstore": {"attempt": "ab" * 16, "num_tokens": 7}}
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 9}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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

    def start(self, app: Starlette) -> str:
        """Serves an app; returns its URL."""
        sock = self.stack.enter_context(listening())
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
        self.running.append(_Server(config))
        self.group.start_soon(self.running[-1].serve, [sock])
        return url_of(sock)

    def stop(self) -> None:
        for server in self.running:
            server.should_exit = True


@contextlib.contextmanager
def nobody() -> Any:
    """A URL where connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield url_of(sock)


Reply = Callable[[dict[str, Any]], Awaitable[Response]]


class Fake:
    """An instance that keeps what it was asked and answers what the test says."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
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
        return JSONResponse({"data": [{"id": "m"}]})

    async def health(self, request: Request) -> Response:
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


@contextlib.asynccontextmanager
async def routed(
    prefills: list[Fake | str], decodes: list[Fake | str], **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router in front of these instances (a string is the URL of one)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(anyio.fail_after(DEADLINE_S))
        async with anyio.create_task_group() as group:
            servers = Servers(group, stack)

            def urls(fakes: list[Fake | str]) -> tuple[str, ...]:
                return tuple(f if isinstance(f, str) else servers.start(f.app) for f in fakes)

            url = servers.start(make_app(Options(urls(prefills), urls(decodes), **options)))
            try:
                async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                    yield client
            finally:
                servers.stop()


async def metric(client: httpx.AsyncClient, line: str) -> float:
    text = (await client.get("/metrics")).text
    return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line)), 0.0)


async def test_relay_asks_p_for_one_token_and_gives_d_what_p_said() -> None:
    p, d = Fake(says({"id": "p", "kv_transfer_params": PARAMS})), Fake(says({"id": "d"}))
    body = BODY | {
        "stream": False,
        "min_tokens": 3,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
    }
    async with routed([p], [d]) as client:
        answer = await client.post("/v1/completions", json=body, headers={"authorization": "B k"})
    assert answer.json() == {"id": "d"}
    assert p.bodies == [
        {
            "model": "m",
            "prompt": "Hello",
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
    ]
    assert d.bodies == [body | {"kv_transfer_params": PARAMS}]
    ids = {fake.headers[0]["x-request-id"] for fake in (p, d)}
    assert ids == {answer.headers["x-request-id"]}
    assert all(fake.headers[0]["authorization"] == "B k" for fake in (p, d))


async def test_the_clients_request_id_is_kept() -> None:
    p, d = Fake(), Fake()
    async with routed([p], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    seen = (p.headers[0]["x-request-id"], d.headers[0]["x-request-id"])
    assert (*seen, answer.headers["x-request-id"]) == ("mine",) * 3


@pytest.mark.parametrize("reply", [says({"id": "p"}), says({"kv_transfer_params": None}), says([])])
async def test_d_gets_no_params_when_p_gave_none(reply: Reply) -> None:
    d = Fake()
    async with routed([Fake(reply)], [d]) as client:
        await client.post("/v1/completions", json=BODY | {"kv_transfer_params": {"forged": 1}})
    assert d.bodies == [BODY]


async def test_chat_goes_the_same_way() -> None:
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4}
    async with routed([p], [d]) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert p.paths == d.paths == ["/v1/chat/completions"]
    assert p.bodies[0]["max_completion_tokens"] == 1
    assert d.bodies[0] == body | {"kv_transfer_params": PARAMS}


async def test_a_refusal_by_p_is_the_answer_and_d_is_not_asked() -> None:
    p, d = Fake(says({"error": {"message": "too long"}}, 400)), Fake()
    async with routed([p, p], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert (len(p.bodies), d.bodies) == (1, [])


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_d_s_error_is_passed_on_unchanged(status: int) -> None:
    d = Fake(says({"error": {"message": "because"}}, status))
    async with routed([Fake()], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY | {"stream": True})
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": "because"}})
    assert len(d.bodies) == 1


async def test_a_failing_p_is_replaced_by_another() -> None:
    bad, good = Fake(says({}, 500)), Fake(says({"kv_transfer_params": PARAMS}))
    d = Fake()
    async with routed([bad, good], [d]) as client:
        await client.post("/v1/completions", json=BODY)
        failures = await metric(client, 'router_upstream_failures_total{reason="status"')
        assert (failures, await metric(client, "router_degraded_total")) == (1, 0)
    assert d.bodies[0]["kv_transfer_params"] == PARAMS


async def test_an_unreachable_p_is_replaced_and_then_asked_last() -> None:
    good, d = Fake(says({"kv_transfer_params": PARAMS})), Fake()
    with nobody() as gone:
        async with routed([gone, good], [d]) as client:
            for _ in range(3):
                await client.post("/v1/completions", json=BODY)
            assert await metric(client, 'router_upstream_failures_total{reason="connect"') == 1
    assert [body["kv_transfer_params"] for body in d.bodies] == [PARAMS] * 3


async def test_without_any_p_d_computes() -> None:
    bad, d = Fake(says({}, 503)), Fake(says({"id": "d"}))
    with nobody() as gone:
        async with routed([gone, bad], [d]) as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert await metric(client, "router_degraded_total") == 1
    assert (answer.status_code, answer.json()) == (200, {"id": "d"})
    assert d.bodies == [BODY]


async def test_a_hanging_p_costs_its_time_out_once() -> None:
    async def hang(body: dict[str, Any]) -> Response:
        return StreamingResponse(never())

    p, d = Fake(hang), Fake()
    async with routed([p, p], [d], prefill_timeout_s=0.2) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert await metric(client, 'router_upstream_failures_total{reason="timeout"') == 1
        await p.was_cancelled.wait()
    assert (len(p.bodies), d.bodies) == (1, [BODY])


async def test_an_unreachable_d_is_replaced_by_another() -> None:
    d = Fake(says({"id": "d"}))
    with nobody() as gone:
        async with routed([Fake()], [gone, d]) as client:
            for _ in range(2):
                assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}


async def test_no_d_is_a_503_in_openai_s_form() -> None:
    with nobody() as gone:
        async with routed([gone], [gone]) as client:
            answer = await client.post("/v1/completions", json=BODY)
            models = await client.get("/v1/models")
    assert answer.status_code == models.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == 503
    assert "decode" in error["message"]


async def test_a_hanging_d_is_a_504() -> None:
    async def hang(body: dict[str, Any]) -> Response:
        await anyio.sleep_forever()
        raise AssertionError

    async with routed([Fake()], [Fake(hang)], read_timeout_s=0.2) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "upstream_error")


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"x"', b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(raw: bytes) -> None:
    p = Fake()
    async with routed([p], [p]) as client:
        answer = await client.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert p.bodies == []


async def test_an_unknown_path_is_a_404_in_openai_s_form() -> None:
    async with routed([Fake()], [Fake()]) as client:
        answer = await client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


async def test_requests_go_round() -> None:
    ps, ds = [Fake(), Fake()], [Fake(), Fake(), Fake()]
    async with routed([*ps], [*ds]) as client:
        for _ in range(6):
            await client.post("/v1/completions", json=BODY)
    assert [len(p.bodies) for p in ps] == [3, 3]
    assert [len(d.bodies) for d in ds] == [2, 2, 2]


async def test_a_stream_is_not_buffered() -> None:
    client_has_first = anyio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        await client_has_first.wait()
        yield b"data: two\n\n"

    async with (
        routed([Fake()], [Fake(streams(chunks))]) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.aiter_raw()
        assert await anext(parts) == b"data: one\n\n"
        client_has_first.set()
        assert b"".join([part async for part in parts]) == b"data: two\n\n"


async def test_a_client_that_leaves_during_the_stream_cancels_d() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        await anyio.sleep_forever()

    d = Fake(streams(chunks))
    async with routed([Fake()], [d]) as client:
        async with client.stream("POST", "/v1/completions", json=BODY) as answer:
            assert await anext(answer.aiter_raw()) == b"data: one\n\n"
        await d.was_cancelled.wait()
        assert await metric(client, "router_disconnects_total") == 1


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
async def test_a_client_that_leaves_early_cancels_p(mode: str) -> None:
    p_is_asked = anyio.Event()

    async def hang(body: dict[str, Any]) -> Response:
        p_is_asked.set()
        return StreamingResponse(never())

    p, d = Fake(hang), Fake(streams(never))
    async with routed([p], [d], mode=mode) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.post("/v1/completions", json=BODY))
            await p_is_asked.wait()
            group.cancel_scope.cancel()
        await p.was_cancelled.wait()
        if mode == "concurrent":
            await d.was_cancelled.wait()
    assert len(d.bodies) == (mode == "concurrent")


async def test_a_d_that_breaks_off_breaks_the_answer_and_is_not_asked_again() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        raise ConnectionError

    class Broken(Fake):
        async def complete(self, request: Request) -> Any:
            self.bodies.append(await request.json())
            return Half()

    class Half:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})

    d, other = Broken(), Fake()
    async with routed([Fake()], [d, other]) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=BODY)
        assert await metric(client, 'router_upstream_failures_total{reason="broken"') == 1
    assert (len(d.bodies), other.bodies) == (1, [])


async def test_concurrent_gives_one_attempt_to_both_and_does_not_wait_for_p() -> None:
    answered = anyio.Event()

    async def slow(body: dict[str, Any]) -> Response:
        await answered.wait()
        return JSONResponse({"kv_transfer_params": PARAMS})

    p, d = Fake(slow), Fake(says({"id": "d"}))
    async with routed([p], [d], mode="concurrent") as client:
        first = await client.post("/v1/completions", json=BODY)
        answered.set()
        await client.post("/v1/completions", json=BODY)
        assert await metric(client, "router_disconnects_total") == 0
    assert first.json() == {"id": "d"}
    attempts = [body["kv_transfer_params"]["pdstore"]["attempt"] for body in d.bodies]
    assert len(set(attempts)) == 2
    assert all(len(bytes.fromhex(attempt)) == 16 for attempt in attempts)
    assert [b["kv_transfer_params"]["pdstore"]["attempt"] for b in p.bodies] == attempts
    assert p.bodies[0]["max_tokens"] == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_concurrent_answers_with_d_when_p_fails(status: int) -> None:
    d = Fake(says({"id": "d"}))
    async with routed([Fake(says({}, status))], [d], mode="concurrent") as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
        while status == 500 and not await metric(client, "router_degraded_total"):
            await anyio.lowlevel.checkpoint()


async def test_health_tells_the_state_of_every_instance() -> None:
    with nobody() as gone:
        async with routed([Fake()], [Fake()]) as client:
            fine = await client.get("/health")
        async with routed([gone], [Fake(), gone]) as client:
            without_p = await client.get("/health")
        async with routed([Fake()], [gone]) as client:
            without_d = await client.get("/health")
    assert (fine.status_code, fine.json()["status"]) == (200, "ok")
    assert (without_p.status_code, without_p.json()["status"]) == (200, "degraded")
    assert [u["ok"] for u in without_p.json()["upstreams"]] == [False, True, False]
    assert (without_d.status_code, without_d.json()["status"]) == (503, "down")


async def test_models_are_those_of_an_instance_that_answers() -> None:
    with nobody() as gone:
        async with routed([Fake()], [gone]) as client:
            assert (await client.get("/v1/models")).json() == {"data": [{"id": "m"}]}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_stops_cleanly(stop: signal.Signals) -> None:
    with listening() as sock, nobody() as gone:
        port = str(sock.getsockname()[1])
    command = [sys.executable, "-m", "examples.router", "--prefill", gone, "--decode", gone]
    with child([*command, "--port", port], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "running on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(stop)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in rest
    assert process.returncode == 0
