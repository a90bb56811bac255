"""Client requests that the router refuses, and what they cost it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdstore.router.intake import Limits
from tests.support.router_kit import Fake, metric, routed

pytestmark = pytest.mark.anyio

DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'"x"', id="a string"),
        pytest.param(b"\xff", id="not UTF-8"),
        pytest.param(DEEP, id="nested"),
        pytest.param(b'{"prompt":"a","temperature":NaN}', id="NaN"),
        pytest.param(b'{"prompt":"a","temperature":-Infinity}', id="Infinity"),
        pytest.param(b'{"prompt":"a","temperature":1e999}', id="over the largest float"),
        pytest.param(b'{"prompt":"\\ud800"}', id="half a character"),
        pytest.param(b'{"prompt":"a","\\udfff":1}', id="half a character in a name"),
        pytest.param(b'{"prompt":"a","x":' + b"9" * 5000 + b"}", id="a number of 5,000 digits"),
    ],
)
async def test_a_body_that_no_instance_could_read_is_a_400(raw: bytes, mode: str) -> None:
    p, d = Fake(), Fake()
    async with routed([p], [d], mode=mode) as client:
        answer = await client.post("/v1/completions", content=raw)
        assert await metric(client, 'router_requests_total{status="400"}') == 1
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert p.bodies == d.bodies == []


async def sends(size: int) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for _ in range(size):
        yield b" "


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_over_the_limit_is_a_413(is_announced: bool) -> None:
    p = Fake()
    async with routed([p], [p], limits=Limits(body_bytes=100)) as client:
        content = b" " * 101 if is_announced else sends(101)
        answer = await client.post("/v1/completions", content=content)
        assert await metric(client, 'router_requests_total{status="413"}') == 1
        assert (await client.post("/v1/completions", content=b'{"a": 1}')).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)


async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    limits = Limits(body_timeout_s=0.1)
    async with routed([Fake()], [Fake()], limits=limits) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert await metric(client, 'router_requests_total{status="408"}') == 1
