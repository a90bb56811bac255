"""Instances that trickle, or send without end: each exchange has one deadline and one size."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from tests.support.router_kit import (
    BODY,
    PARAMS,
    Fake,
    metric,
    routed,
    says,
    streams,
    trickle,
    without_end,
)

pytestmark = pytest.mark.anyio
SOURCES = {"trickles": (trickle, "timeout"), "sends without end": (without_end, "broken")}
each_source = pytest.mark.parametrize("how", SOURCES)
"""All tests here end by the deadline of `routed`, which is far below the limits for a read."""


@each_source
@pytest.mark.parametrize("mode", ["relay", "concurrent"])
async def test_a_p_without_an_end_costs_its_time_at_most_and_d_computes(
    mode: str, how: str
) -> None:
    source, reason = SOURCES[how]
    p, d = Fake(streams(source)), Fake(says({"id": "d"}))
    limit_s = 0.5 if how == "trickles" else 60.0
    async with routed([p, p], [d], mode=mode, prefill_timeout_s=limit_s) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
        failures = f'router_upstream_failures_total{{reason="{reason}",role="prefill"'
        while not await metric(client, failures):
            await anyio.sleep(0.01)
    assert len(p.bodies) == 1


@each_source
async def test_a_refusal_of_p_without_an_end_is_none(how: str) -> None:
    async def reply(body: dict[str, Any]) -> Any:
        response = await streams(SOURCES[how][0])(body)
        response.status_code = 400
        return response

    p, d = Fake(reply), Fake(says({"id": "d"}))
    limit_s = 0.5 if how == "trickles" else 60.0
    async with routed([p], [d], prefill_timeout_s=limit_s) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}


@each_source
async def test_probes_and_the_list_of_models_are_bounded(how: str) -> None:
    odd, good = Fake(), Fake()
    odd.probed = streams(SOURCES[how][0])
    answers: dict[str, httpx.Response] = {}
    async with routed([odd], [good]) as client, anyio.create_task_group() as group:

        async def get(path: str) -> None:
            answers[path] = await client.get(path, timeout=60)

        group.start_soon(get, "/health")
        group.start_soon(get, "/v1/models")
    assert answers["/v1/models"].json() == {"data": [{"id": "m"}]}
    said = answers["/health"].json()
    assert [each["ok"] for each in said["upstreams"]] == [False, True]
    assert said["status"] == "degraded"


@each_source
async def test_models_come_from_a_d_that_ends_its_answer(how: str) -> None:
    odd, good = Fake(), Fake()
    odd.probed = streams(SOURCES[how][0])
    async with routed([], [odd, good]) as client:
        got = [await client.get("/v1/models", timeout=60) for _ in range(2)]
    assert [each.json() for each in got] == [{"data": [{"id": "m"}]}] * 2


FIRST = {
    "id": "p",
    "created": 1,
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "kv_transfer_params": PARAMS,
}
OF_A_TOKEN: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
OF_A_TOKEN |= {"token_ids": [7]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}


@each_source
async def test_a_d_that_is_asked_whether_it_takes_ids_is_bounded(how: str) -> None:
    async def reply(body: dict[str, Any]) -> Any:
        is_probe = body["max_tokens"] == 1
        return await (streams(SOURCES[how][0]) if is_probe else says({"id": "d"}))(body)

    p = Fake(says(FIRST))
    limit_s = 1.0 if how == "trickles" else 60.0
    d = Fake(reply)
    async with routed([p], [d], first_token="prefill", prefill_timeout_s=limit_s) as client:
        got = await client.post("/v1/chat/completions", json=CHAT)
        assert await metric(client, "router_upstream_failures_total") == 1
    assert got.json() == {"id": "d"}
    assert [body["max_tokens"] for body in d.bodies] == [1, 9]


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_what_the_router_keeps_of_ds_answer_has_a_size(more: dict[str, Any]) -> None:
    choice = OF_A_TOKEN | {"text": " a", "prompt_token_ids": [1, 2, 3]}
    p, d = Fake(says(FIRST | {"choices": [choice]})), Fake(streams(without_end))
    async with routed([p], [d], first_token="prefill") as client:
        if more:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/completions", json=BODY | more)
        else:
            got = await client.post("/v1/completions", json=BODY)
            assert (got.status_code, "D sent an answer of more" in got.text) == (502, True)
        assert await metric(client, 'router_upstream_failures_total{reason="broken"') == 1
