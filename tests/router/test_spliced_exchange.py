"""The client gets P's first token at once, and D's answer behind it; else it goes as without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.responses import JSONResponse, Response

from pdstore.format.handoff import TransferParams
from tests.support.router_kit import BODY, PARAMS, Fake, routed, says, streams

pytestmark = pytest.mark.anyio


def answer(text: str = " a", finish_reason: str = "length") -> dict[str, Any]:
    """P's, to a prompt of three tokens."""
    ids = {"token_ids": [7], "prompt_token_ids": [1, 2, 3]}
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None, **ids}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    head = {"id": "p", "created": 1, "kv_transfer_params": {"pdstore": {}}}
    return {**head, "choices": [choice], "usage": usage}


FIRST = answer() | {"kv_transfer_params": PARAMS}
REST = BODY | {"prompt": [1, 2, 3, 7], "max_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def event(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
    return b"data: " + json.dumps({"id": "d", "choices": [choice], **more}).encode() + b"\n\n"


def spliced(p: Fake | str, d: Fake | str, **options: Any) -> Any:
    return routed([p], [d], first_token="prefill", **options)


async def test_ps_token_is_streamed_before_d_answers() -> None:
    client_has_first = anyio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        await client_has_first.wait()
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        cut = event(" b") + event(" c", usage=usage) + b"data: [DONE]\n\n"
        yield cut[:20]
        yield cut[20:]

    p, d = Fake(says(FIRST)), Fake(streams(chunks))
    async with (
        spliced(p, d) as client,
        client.stream("POST", "/v1/completions", json=BODY | STREAM) as got,
    ):
        assert got.headers["content-type"].startswith("text/event-stream")
        parts = got.aiter_raw()
        first = json.loads((await anext(parts)).removeprefix(b"data: "))
        assert first["choices"][0] == {
            "index": 0,
            "text": " a",
            "finish_reason": None,
            "logprobs": None,
        }
        client_has_first.set()
        rest = b"".join([part async for part in parts]).split(b"\n\n")
    assert rest[2:] == [b"data: [DONE]", b""]
    later = [json.loads(part.removeprefix(b"data: ")) for part in rest[:2]]
    assert [part["choices"][0]["text"] for part in later] == [" b", " c"]
    assert {part["id"] for part in later} == {"p"}
    assert later[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize("body", [{}, STREAM])
@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(1, "length"), (9, "stop")], ids=["one token", "stop first"]
)
async def test_an_answer_of_one_token_never_reaches_d(
    body: dict[str, Any], max_tokens: int, reason: str
) -> None:
    d = Fake()
    async with spliced(Fake(says(answer(finish_reason=reason))), d) as client:
        got = await client.post("/v1/completions", json=BODY | body | {"max_tokens": max_tokens})
    assert d.bodies == []
    if body:
        told, usage, done, _ = got.text.split("\n\n")
        assert json.loads(told.removeprefix("data: "))["choices"][0]["finish_reason"] == reason
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 1
        assert done == "data: [DONE]"
    else:
        assert got.json()["choices"][0]["finish_reason"] == reason
        assert "kv_transfer_params" not in got.json()


OF_THE_ANSWER_SO_FAR = [
    *({"n": 2}, {"best_of": 2}, {"echo": True}, {"stop": ["x"]}, {"seed": 3}, {"max_tokens": 3.0}),
    *({"presence_penalty": 0.5}, {"prompt": ["one", "two"]}, {"response_format": {"type": "x"}}),
    *({"some_new_field": 1}, {"stream_options": {"continuous_usage_stats": True}}),
]


@pytest.mark.parametrize("more", OF_THE_ANSWER_SO_FAR, ids=str)
async def test_what_cannot_be_continued_is_ds_alone(more: dict[str, Any]) -> None:
    p, d = Fake(says(FIRST)), Fake(says({"id": "d"}))
    async with spliced(p, d) as client:
        assert (await client.post("/v1/completions", json=BODY | more)).json() == {"id": "d"}
    handed = {} if "prompt" in more else {"kv_transfer_params": PARAMS}
    assert d.bodies == [BODY | more | handed]
    assert "return_token_ids" not in p.bodies[0]
    assert "keeps_last_token" not in p.bodies[0].get("kv_transfer_params", {})


async def test_p_hands_its_whole_prompt_over_for_a_d_that_continues_it() -> None:
    p, d = Fake(says(FIRST)), Fake(says(answer(text=" b", finish_reason="stop")))
    async with spliced(p, d) as client:
        await client.post("/v1/completions", json=BODY)
    assert TransferParams.parse(p.bodies[0]["kv_transfer_params"]).keeps_last_token
    assert not TransferParams.parse(d.bodies[0]["kv_transfer_params"]).keeps_last_token


@pytest.mark.parametrize("is_exact", [True, False])
async def test_d_gets_a_hand_off_from_whose_end_it_can_give_the_first_token(is_exact: bool) -> None:
    """P is asked again only if D could not use a part of the hand-off that has the last token."""
    params = [{"pdstore": {"attempt": f"{n:032x}", "is_exact": is_exact}} for n in range(2)]
    replies = [answer(text="\ufffd") | {"kv_transfer_params": each} for each in params]

    async def prefill(body: dict[str, Any]) -> Response:
        return JSONResponse(replies[len(p.bodies) - 1])

    p, d = Fake(prefill), Fake(says({"id": "d"}))
    async with spliced(p, d) as client:
        assert (await client.post("/v1/completions", json=BODY)).json() == {"id": "d"}
    keeps = [TransferParams.parse(b["kv_transfer_params"]).keeps_last_token for b in p.bodies]
    assert keeps == ([True, False] if is_exact else [True])
    assert d.bodies == [BODY | {"kv_transfer_params": params[is_exact]}]


async def test_a_lost_hand_off_is_made_again_behind_the_token() -> None:
    dead = {"message": "the hand-off fell short: handoff_dead", "code": "handoff_dead"}
    replies = [
        JSONResponse({"error": dead}, 502),
        JSONResponse(answer(text=" b", finish_reason="stop")),
    ]

    async def reply(body: dict[str, Any]) -> Response:
        return replies.pop(0)

    p, d = Fake(says(FIRST)), Fake(reply)
    async with spliced(p, d, retries=1) as client:
        got = await client.post("/v1/completions", json=BODY)
    assert got.json()["choices"][0]["text"] == " a b"
    assert [body["prompt"] for body in p.bodies] == ["Hello", [1, 2, 3, 7]]
    assert d.bodies == [REST | {"kv_transfer_params": PARAMS}] * 2
