"""The plainest PD proxy: P is asked for one token, D gets what P said, and its answer passes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.testclient import TestClient

from examples import plain_proxy

PARAMS = {"pdstore": {"attempt": "a1"}}
BODY = {"prompt": "Hello", "max_tokens": 9, "stream": True, "stream_options": {"x": 1}}


async def stream() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"


class Instances:
    """P and D: what they were asked, by host."""

    def __init__(self, params: object) -> None:
        self.params = params
        self.asked: dict[str, dict] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked[request.url.host] = json.loads(await request.aread())
        if request.url.host == "p":
            return httpx.Response(200, json={"kv_transfer_params": self.params})
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(201, content=stream(), headers=headers)


@pytest.fixture
def make_client(monkeypatch: pytest.MonkeyPatch):
    def make(instances: Instances) -> TestClient:
        client = httpx.AsyncClient(transport=httpx.MockTransport(instances.answer))
        monkeypatch.setattr(plain_proxy.httpx, "AsyncClient", lambda **_: client)
        return TestClient(plain_proxy.make_app("http://p", "http://d"))

    return make


def test_d_gets_what_p_said(make_client) -> None:
    instances = Instances(PARAMS)
    answer = make_client(instances).post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.text) == (201, "data: 1\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert instances.asked["p"] == {
        "prompt": "Hello",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": plain_proxy.ASK_P,
    }
    assert instances.asked["d"] == {**BODY, "kv_transfer_params": PARAMS}


def test_d_gets_the_request_as_it_is_when_p_said_nothing(make_client) -> None:
    instances = Instances(None)
    make_client(instances).post("/v1/completions", json=BODY)
    assert instances.asked["d"] == BODY
