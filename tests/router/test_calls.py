"""The router where P or D is away, fails, hangs, or lost the hand-off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.router_kit import (
    BODY,
    PARAMS,
    Fake,
    Reply,
    metric,
    never,
    nobody,
    routed,
    says,
    streams,
)

pytestmark = pytest.mark.anyio


async def test_a_refusal_by_p_is_the_answer_and_d_is_not_asked() -> None:
    p, d = Fake(says({"error": {"message": "too long"}}, 400)), Fake()
    async with routed([p, p], [d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert (len(p.bodies), d.bodies) == (1, [])


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_a_p_that_began_nothing_is_replaced_by_another(status: int) -> None:
    bad, good = Fake(says({}, status)), Fake(says({"kv_transfer_params": PARAMS}))
    d = Fake()
    async with routed([bad, good], [d]) as client:
        await client.post("/v1/completions", json=BODY)
        failures = await metric(client, 'router_upstream_failures_total{reason="status"')
        assert (failures, await metric(client, "router_degraded_total")) == (1, 0)
    assert d.bodies[0]["kv_transfer_params"] == PARAMS


async def breaks_off(body: dict[str, Any]) -> Response:
    async def part() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionError("the engine crashes")

    return StreamingResponse(part())


@pytest.mark.parametrize("reply", [breaks_off, says({}, 500), says({}, 502)])
async def test_a_request_that_fails_its_p_is_given_to_no_other(reply: Reply) -> None:
    p, d = Fake(reply), Fake()
    async with routed([p, p, p], [d]) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert await metric(client, "router_degraded_total") == 1
    assert (len(p.bodies), d.bodies) == (1, [BODY])


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_d_is_replaced_by_another(status: int) -> None:
    full, free = Fake(says({}, status)), Fake(says({"id": "d"}))
    async with routed([], [full, free]) as client:
        answers = [await client.post("/v1/completions", json=BODY) for _ in range(4)]
        failures = await metric(client, 'router_upstream_failures_total{reason="status",role="d')
    assert [answer.status_code for answer in answers] == [200] * 4
    assert failures == len(full.bodies) > 0


STOPPING = {"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}
"""What a vLLM 0.32 that drains answers to each new request, with the status 500."""


async def test_instances_that_stop_are_replaced_by_others() -> None:
    stopping, p, d = Fake(says(STOPPING, 500)), Fake(says({"kv_transfer_params": PARAMS})), Fake()
    async with routed([stopping, p], [stopping, d]) as client:
        answers = [await client.post("/v1/completions", json=BODY) for _ in range(4)]
        degraded = await metric(client, "router_degraded_total")
    assert ([answer.status_code for answer in answers], degraded) == ([200] * 4, 0)
    assert [body.get("kv_transfer_params") for body in d.bodies] == [PARAMS] * 4
    assert len(stopping.bodies) == 2, "asked once as P and once as D, then only after the others"


async def test_if_the_only_d_stops_the_client_may_ask_again() -> None:
    async with routed([], [Fake(says(STOPPING, 500))]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()) == (503, STOPPING)


async def test_the_answer_of_a_d_that_fails_is_counted_and_passed_on() -> None:
    d = Fake(says({"error": "gone"}, 500))
    async with routed([], [d, d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert await metric(client, 'router_upstream_failures_total{reason="status"') == 1
    assert (answer.status_code, answer.json(), len(d.bodies)) == (500, {"error": "gone"}, 1)


async def test_if_every_d_is_full_the_client_is_told() -> None:
    d = Fake(says({"error": "full"}, 503))
    async with routed([], [d, d]) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json(), len(d.bodies)) == (503, {"error": "full"}, 2)


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


async def test_nobody_waits_for_a_silent_p_until_one_request_has_tried_it_again() -> None:
    is_hung = True

    async def answer(body: dict[str, Any]) -> Response:
        if is_hung:
            return StreamingResponse(never())
        return JSONResponse({"kv_transfer_params": PARAMS})

    p, d = Fake(answer), Fake()
    async with routed([p], [d], prefill_timeout_s=1.0) as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(p.bodies) == 1
        assert await metric(client, "router_degraded_total") == 2
        is_hung = False
        while len(p.bodies) == 1:
            await anyio.sleep(0.05)
            await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json=BODY)
    assert len(p.bodies) == 3
    assert [body.get("kv_transfer_params") for body in d.bodies[-2:]] == [PARAMS] * 2


async def test_a_d_that_breaks_off_breaks_the_answer_and_is_not_asked_again() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})

    async def broken(body: dict[str, Any]) -> Any:
        return half

    d, other = Fake(broken), Fake()
    async with routed([Fake()], [d, other]) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=BODY)
        assert await metric(client, 'router_upstream_failures_total{reason="broken"') == 1
    assert (len(d.bodies), other.bodies) == (1, [])


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


@pytest.mark.parametrize("how", LOST)
async def test_a_lost_hand_off_is_a_502_with_its_reason(how: str) -> None:
    reply, reason = LOST[how]
    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(reply)
    async with routed([p], [d]) as client:
        got = await client.post("/v1/completions", json=BODY)
        assert await metric(client, "router_lost_handoffs_total") == 1
    assert got.status_code == 502
    assert reason in got.json()["error"]["message"]
    assert (len(p.bodies), len(d.bodies)) == (1, 1)


@pytest.mark.parametrize("how", LOST)
async def test_p_is_asked_once_more_and_d_answers(how: str) -> None:
    p = Fake(says({"kv_transfer_params": PARAMS}))
    d = Fake(then(LOST[how][0], says({"id": "d"})))
    async with routed([p], [d], retries=1) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
    assert (len(p.bodies), len(d.bodies)) == (2, 2)


@pytest.mark.parametrize("body", ["<html>Bad Gateway</html>", '{"error": {"code": 502}}', "[]"])
async def test_a_gateways_502_is_no_lost_hand_off_and_is_passed_on(body: str) -> None:
    async def gateway(asked: dict[str, Any]) -> Response:
        return Response(body, 502)

    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(gateway)
    async with routed([p], [d], retries=1) as client:
        got = await client.post("/v1/completions", json=BODY)
        assert await metric(client, "router_lost_handoffs_total") == 0
    assert (got.status_code, got.text, len(d.bodies)) == (502, body, 1)


async def test_a_502_without_a_hand_off_is_passed_on() -> None:
    p, d = Fake(says({})), Fake(says(DEAD, 502))
    async with routed([p], [d], retries=1) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == DEAD
    assert len(p.bodies) == 1
