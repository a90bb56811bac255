"""A hand-off that D could not use and does not compute: 502 with the reason, or once more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.support.router_kit import (
    BODY,
    PARAMS,
    Fake,
    Reply,
    metric,
    routed,
    says,
    streams,
)

pytestmark = pytest.mark.anyio

DEAD = {"error": {"message": "the hand-off fell short: handoff_dead", "code": "handoff_dead"}}
VLLM = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}


async def vllm_stream() -> AsyncIterator[bytes]:
    yield b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
    yield b"data: [DONE]\n\n"


LOST = {
    "mini engine": (says(DEAD, 502), "handoff_dead"),
    "vLLM": (says(VLLM, 500), "pdstore_misses"),
    "vLLM, streaming": (streams(vllm_stream), "pdstore_misses"),
}


def then(*replies: Reply) -> Reply:
    waiting = list(replies)

    async def reply(body: dict[str, Any]) -> Response:
        return await waiting.pop(0)(body)

    return reply


@pytest.mark.parametrize(("reply", "reason"), LOST.values(), ids=LOST)
async def test_a_lost_hand_off_is_a_502_with_its_reason(reply: Reply, reason: str) -> None:
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(reply)
    async with routed([p], [d]) as client:
        got = await client.post("/v1/completions", json=BODY)
        assert await metric(client, "router_lost_handoffs_total") == 1
    assert got.status_code == 502
    assert reason in got.json()["error"]["message"]
    assert (len(p.bodies), len(d.bodies)) == (1, 1)


@pytest.mark.parametrize(("reply", "reason"), LOST.values(), ids=LOST)
async def test_p_is_asked_once_more_and_d_answers(reply: Reply, reason: str) -> None:
    p = Fake(says({"kv_transfer_params": PARAMS}))
    d = Fake(then(reply, says({"id": "d"})))
    async with routed([p], [d], retries=1) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
    assert (len(p.bodies), len(d.bodies)) == (2, 2)


async def test_retries_have_an_end() -> None:
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(says(DEAD, 502))
    async with routed([p], [d], retries=2) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 502
    assert (len(p.bodies), len(d.bodies)) == (3, 3)


async def test_a_502_without_a_hand_off_is_passed_on() -> None:
    async def reply(body: dict[str, Any]) -> Response:
        return JSONResponse(DEAD, 502)

    p, d = Fake(says({})), Fake(reply)
    async with routed([p], [d], retries=1) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == DEAD
    assert len(p.bodies) == 1
