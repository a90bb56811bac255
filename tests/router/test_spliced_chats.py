"""D is asked once whether it takes token ids in chats; without them a chat goes as any other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.support.router_kit import Fake, metric, routed, says, streams

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
PROMPT, TOKEN = [1, 2, 3], 7
LOST = {"message": "the hand-off fell short: no state", "code": "handoff_dead"}


def chat_answer(text: str, ids: list[int], prompt: list[int]) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length",
        "token_ids": ids,
        "logprobs": None,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
    return {"id": "x", "choices": [choice], "prompt_token_ids": prompt, "usage": usage}


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def handed(body: dict[str, Any]) -> Any:
    """The hand-off in a request to D."""
    return (body.get("kv_transfer_params") or {}).get("pdstore")


class Prefill(Fake):
    """A P whose every hand-off has an id of its own, and that notes which keep the last token."""

    def __init__(self) -> None:
        super().__init__(self._prefill)
        self.given: list[dict[str, Any]] = []
        self.keeping: list[dict[str, Any]] = []

    async def _prefill(self, body: dict[str, Any]) -> Response:
        self.given.append({"attempt": f"{len(self.given):032x}"})
        if body["kv_transfer_params"].get("keeps_last_token"):
            self.keeping.append(self.given[-1])
        params = {"kv_transfer_params": {"pdstore": self.given[-1]}}
        return JSONResponse(chat_answer(" a", [TOKEN], PROMPT) | params)


class Decode(Fake):
    """A D that takes token ids or not, and refuses to compute behind the hand-offs in `lost`.

    continues: True if it goes on behind an assistant's last message.
    """

    def __init__(
        self, lost: list[dict[str, Any]], *, takes_ids: bool, continues: bool = True
    ) -> None:
        super().__init__(self._decode)
        self._lost = lost
        self._continues = continues
        self.takes_ids = takes_ids

    async def _decode(self, body: dict[str, Any]) -> Response:
        if handed(body) is not None and handed(body) in self._lost:
            return JSONResponse({"error": LOST}, 502)
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = ids if ids and self.takes_ids else PROMPT
        if body.get("continue_final_message") and self._continues and prompt is PROMPT:
            assert body["messages"][-1] == {"role": "assistant", "content": " a"}
            prompt = [*PROMPT, TOKEN]
        answer = chat_answer(" b", [8], prompt)
        if not body.get("stream"):
            return JSONResponse(answer)
        choice = answer["choices"][0]
        part = answer | {"choices": [choice | {"delta": choice.pop("message")}]}
        return Response(f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n")


async def test_a_d_that_takes_ids_is_asked_once_and_goes_on_behind_p_s_token() -> None:
    p, d = Prefill(), Decode([], takes_ids=True)
    async with routed([p], [d], first_token="prefill") as client:
        for _ in range(2):
            assert text_of(await client.post("/v1/chat/completions", json=CHAT)) == " a b"
        assert await metric(client, "router_spliced_total") == 2
    question, *chats = d.bodies
    assert handed(question) is None, "a hand-off may be lost, and the answer with it"
    assert len(str(question)) < 500, "D has to compute this prompt"
    assert [handed(body) for body in chats] == p.given == p.keeping
    ids = [body["kv_transfer_params"]["prompt_token_ids"] for body in chats]
    assert ids == [[*PROMPT, TOKEN]] * 2


async def test_chats_of_a_d_without_ids_are_handed_over_in_the_ordinary_way() -> None:
    """A D with states finds none before the last token, which P was asked to keep."""
    p = Prefill()
    d = Decode(p.keeping, takes_ids=False)
    async with routed([p], [d], first_token="prefill") as client:
        for _ in range(2):
            assert text_of(await client.post("/v1/chat/completions", json=CHAT)) == " b"
        assert await metric(client, "router_lost_handoffs_total") == 0
    assert p.keeping == []
    assert [handed(body) for body in d.bodies[1:]] == p.given
    assert len(d.bodies) == 3, "D has said it once for all"


@pytest.mark.parametrize("status", [200, 400, 500, 502])
async def test_a_d_that_refuses_the_question_answers_the_chat_and_is_asked_again(
    status: int,
) -> None:
    async def reply(body: dict[str, Any]) -> Response:
        if body["max_tokens"] == 1:  # the question
            return await says([] if status == 200 else {"error": LOST}, status)(body)
        return JSONResponse(chat_answer(" b", [8], PROMPT))

    p, d = Prefill(), Fake(reply)
    async with routed([p], [d], first_token="prefill") as client:
        for _ in range(2):
            assert text_of(await client.post("/v1/chat/completions", json=CHAT)) == " b"
        is_d_at_fault = status >= 500
        failed = await metric(client, 'router_upstream_failures_total{reason="status"')
        assert failed == 2 * is_d_at_fault
    assert [body["max_tokens"] for body in d.bodies] == [1, 9, 1, 9]
    assert p.keeping == []


@pytest.mark.parametrize("takes_ids", [True, False])
async def test_a_chat_that_is_prefilled_again_is_decoded_with_the_last_hand_off(
    takes_ids: bool,
) -> None:
    p = Prefill()
    d = Decode([{"attempt": f"{0:032x}"}], takes_ids=takes_ids)
    async with routed([p], [d], first_token="prefill", retries=1) as client:
        got = text_of(await client.post("/v1/chat/completions", json=CHAT))
        assert got == (" a b" if takes_ids else " b")
        assert await metric(client, "router_lost_handoffs_total") == 1
    assert [handed(body) for body in d.bodies if handed(body)] == p.given
    assert len(p.given) == 2


def questions(d: Fake) -> int:
    """How often a D was asked whether it takes token ids."""
    return sum(body["max_tokens"] == 1 for body in d.bodies)


async def test_a_chat_is_answered_by_a_d_that_replaces_one_that_took_token_ids() -> None:
    """Its answer tells, so no chat asks again, and the next ones go the ordinary way."""
    p, d = Prefill(), Decode([], takes_ids=True)
    async with routed([p], [d], first_token="prefill") as client:
        assert text_of(await client.post("/v1/chat/completions", json=CHAT)) == " a b"
        d.takes_ids = False
        for _ in range(2):
            assert text_of(await client.post("/v1/chat/completions", json=CHAT)) == " b"
        assert await metric(client, "router_spliced_total") == 1
    assert questions(d) == 1
    assert len(p.given) == 4, "P is asked again only for the chat that was begun with its token"
    assert handed(d.bodies[-1]) == p.given[-1]
    assert "prompt_token_ids" not in d.bodies[-1]["kv_transfer_params"]


async def stream_of(client: Any) -> list[Any]:
    """The parts of a streamed chat, without its [DONE]."""
    got = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    *parts, done, end = got.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def contents(parts: list[Any]) -> str:
    return "".join(part["choices"][0]["delta"]["content"] for part in parts)


async def test_a_stream_that_has_begun_is_continued_by_a_d_that_takes_no_token_ids() -> None:
    p, d = Prefill(), Decode([], takes_ids=True)
    async with routed([p], [d], first_token="prefill") as client:
        assert contents(await stream_of(client)) == " a b"
        d.takes_ids = False
        assert contents(await stream_of(client)) == " a b"
        assert contents(await stream_of(client)) == " b"
    assert questions(d) == 1
    in_ids, in_words = d.bodies[-3:-1]
    assert in_words["max_tokens"] == in_ids["max_tokens"] == CHAT["max_tokens"] - 1
    assert in_words["messages"][:-1] == CHAT["messages"]
    assert in_words["add_generation_prompt"] is False


async def test_a_stream_is_not_continued_by_an_answer_of_another_prompt() -> None:
    d = Decode([], takes_ids=True, continues=False)
    async with routed([Prefill()], [d], first_token="prefill") as client:
        assert contents(await stream_of(client)) == " a b"
        d.takes_ids = False
        first, error = await stream_of(client)
        assert contents([first]) == " a"
        assert "takes no token ids" in error["error"]["message"]


@pytest.mark.parametrize("took_ids", [True, False])
async def test_a_d_that_was_away_is_asked_again_what_it_takes(took_ids: bool) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield b" "
        raise ConnectionError

    p, d = Prefill(), Decode([], takes_ids=took_ids)
    async with routed([p], [d], first_token="prefill") as client:
        await client.post("/v1/chat/completions", json=CHAT)
        d.probed, d.takes_ids = streams(breaks), not took_ids
        for _ in range(2):
            assert (await client.get("/health")).json()["status"] == "down"
        for _ in range(2):
            got = text_of(await client.post("/v1/chat/completions", json=CHAT))
            assert got == (" b" if took_ids else " a b")
    assert questions(d) == 2
    assert len(p.given) == 3
