"""The router's concurrent mode: one hand-off id for P and D at once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.router_kit import (
    BODY,
    PARAMS,
    Fake,
    Reply,
    metric,
    never,
    routed,
    says,
)

pytestmark = pytest.mark.anyio


async def test_concurrent_gives_one_handoff_id_to_both_and_does_not_wait_for_p() -> None:
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
    ids = [body["kv_transfer_params"]["pdstore"]["attempt"] for body in d.bodies]
    assert len(set(ids)) == 2
    assert all(len(bytes.fromhex(each)) == 16 for each in ids)
    assert [b["kv_transfer_params"]["pdstore"]["attempt"] for b in p.bodies] == ids
    assert p.bodies[0]["max_tokens"] == 1
    assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert d.bodies[0]["kv_transfer_params"].keys() == {"pdstore"}


@pytest.mark.parametrize("status", [400, 500])
async def test_concurrent_answers_with_d_when_p_fails(status: int) -> None:
    d = Fake(says({"id": "d"}))
    async with routed([Fake(says({}, status))], [d], mode="concurrent") as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
        while status == 500 and not await metric(client, "router_degraded_total"):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("p", [says({}, 500), says({"id": "p"})])
async def test_d_is_asked_anew_when_p_publishes_nothing(p: Reply) -> None:
    """D has sent its headers, as vLLM does, and would wait for the hand-off until its deadline."""

    async def waits_for_the_handoff(body: dict[str, Any]) -> Response:
        if "kv_transfer_params" in body:
            return StreamingResponse(never())
        return JSONResponse({"id": "computed"})

    d = Fake(waits_for_the_handoff)
    async with routed([Fake(p)], [d], mode="concurrent") as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "computed"}
        await d.was_cancelled.wait()
    assert d.bodies[1] == BODY


async def test_d_is_asked_anew_with_the_answer_of_a_p_that_did_not_save_its_last() -> None:
    """With the id alone D would wait for markers until its deadline; P's answer lets it doubt."""
    params = {"pdstore": {**PARAMS["pdstore"], "last_save": "store_full"}}

    async def waits_without_an_answer(body: dict[str, Any]) -> Response:
        if "last_save" not in body["kv_transfer_params"]["pdstore"]:
            return StreamingResponse(never())
        return JSONResponse({"id": "told"})

    p, d = Fake(says({"kv_transfer_params": params})), Fake(waits_without_an_answer)
    async with routed([p], [d], mode="concurrent") as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "told"}
        await d.was_cancelled.wait()
    assert d.bodies[1]["kv_transfer_params"] == params


async def test_a_d_that_breaks_off_before_it_begins_is_a_502() -> None:
    class Broken(Fake):
        async def complete(self, request: Request) -> Any:
            return HeadersOnly()

    class HeadersOnly:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    p = Fake(says({"kv_transfer_params": PARAMS}))
    async with routed([p], [Broken()], mode="concurrent") as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_error")
