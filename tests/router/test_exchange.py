"""The router's exchange: one after the other, and both at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from examples.plain_proxy import ASK_P
from tests.support.router_kit import BODY, PARAMS, Fake, Reply, metric, never, routed, says, streams

pytestmark = pytest.mark.anyio


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
            "min_tokens": 1,
            "max_completion_tokens": 1,
            "kv_transfer_params": ASK_P,
        }
    ]
    assert d.bodies == [body | {"kv_transfer_params": PARAMS}]
    ids = {fake.headers[0]["x-request-id"] for fake in (p, d)}
    assert ids == {answer.headers["x-request-id"]}
    assert all(fake.headers[0]["authorization"] == "B k" for fake in (p, d))


@pytest.mark.parametrize("prompt", [[5, 6, 7], "Hello", ["Hello", "you"], None])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 9}])
async def test_a_prompt_is_encoded_before_p_is_asked_and_not_again(
    monkeypatch: pytest.MonkeyPatch, prompt: object, more: dict[str, Any]
) -> None:
    """Of many token ids this takes milliseconds, for which D would wait after P's answer."""
    encoded = []
    dumps = json.dumps

    def spy(body: object, **options: Any) -> str:
        encoded.append(body)
        return dumps(body, **options)

    p, d = Fake(says({"kv_transfer_params": PARAMS})), Fake(says({"id": "d"}))
    async with routed([p], [d]) as client:
        monkeypatch.setattr(json, "dumps", spy)
        await client.post("/v1/completions", json={"prompt": prompt} | more)
        await client.post("/v1/completions", json={"messages": prompt} | more)
    of_prompt = [body for body in encoded if isinstance(body, dict) and "prompt" in body]
    assert of_prompt == [{"prompt": prompt}]
    assert [body.get("prompt", body.get("messages")) for body in p.bodies] == [prompt] * 2
    params = (
        {} if isinstance(prompt, list) and prompt[0] == "Hello" else {"kv_transfer_params": PARAMS}
    )
    assert d.bodies[0] == {"prompt": prompt} | more | params


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
