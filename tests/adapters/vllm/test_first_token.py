"""The router passes P's first token on, and D goes on behind it, as one instance would."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pdstore.router.first_token import FirstChatToken, first_body
from pdstore.router.intake import Asked
from tests.adapters.vllm.asking import (
    ANSWER_S,
    MAX_DIFFERENCE,
    Since,
    alone,
    ask,
    new_prompt,
    num_spliced,
    post,
)

BLOCK, NUM_LETTERS = 64, 94
"""The tokens below NUM_LETTERS are ASCII; behind half a character no token's text is clear."""


@pytest.fixture(scope="module")
def router(started_pair, launcher):
    router = launcher.router(started_pair.p, started_pair.d, "--first-token", "prefill")
    yield router.wait_ready()
    router.stop()


def test_the_answer_is_that_of_one_instance_and_d_computes_p_s_token_alone(pair, router):
    for num_tokens in (1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK, 150, 200, 250, 300, 350, 900):
        prompt = [token % NUM_LETTERS for token in new_prompt(num_tokens)]
        expected = alone(pair.d, prompt)
        since = Since(pair.d)
        answer = ask(router, prompt)
        answer.assert_same(expected)
        [choice], [theirs] = answer.body["choices"], expected.body["choices"]
        for name in ("text", "finish_reason", "prompt_token_ids"):
            assert choice[name] == theirs[name]
        assert choice["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = [[body["usage"][n] for n in counts] for body in (answer.body, expected.body)]
        assert usage[0] == usage[1]
        assert since.computed <= 1
        assert since.loaded in ({num_tokens} if num_tokens > 1 else {0, 1})
    assert num_spliced(router) > 0, "every first token was half a character"


def test_an_answer_of_one_token_never_reaches_d(pair, router):
    for stream in (False, True):
        since = Since(pair.d)
        response = post(router, new_prompt(100), 1, stream=stream)
        assert response.status_code == 200
        assert since.computed == since.loaded == 0


def chat(server, text: str, **more: Any) -> list[dict[str, Any]]:
    """The parts of a chat's answer, which is streamed."""
    body = {
        "messages": [{"role": "user", "content": text}],
        **{"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
        **{"return_token_ids": True, **more},
    }
    url = server.url + "/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def said(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """All that is equal in two answers, but for their logprobs."""
    choices = [choice for part in parts for choice in part["choices"]]
    contents = [choice["delta"].get("content") or "" for choice in choices]
    usage = parts[-1]["usage"]
    return {
        "text": "".join(contents),
        "ids": [id for choice in choices for id in choice.get("token_ids") or ()],
        "prompt": next(part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")),
        "ends": [each["finish_reason"] for each in choices if each["finish_reason"]],
        "usage": [usage[n] for n in ("prompt_tokens", "completion_tokens", "total_tokens")],
    }


def logprobs_of(parts: list[dict[str, Any]]) -> list[float]:
    told = [choice["logprobs"] for part in parts for choice in part["choices"]]
    return [each["logprob"] for one in told if one for each in one["content"]]


def test_a_chat_goes_on_behind_p_s_token_in_token_ids(pair, router):
    before = num_spliced(router)
    for number in range(4):
        text = f"2 words and {number} words. " * 12
        expected = chat(pair.d, text, cache_salt=f"chat {number}")
        since = Since(pair.d)
        answer = chat(router, text)
        assert said(answer) == said(expected)
        assert logprobs_of(answer) == pytest.approx(logprobs_of(expected), abs=MAX_DIFFERENCE)
        assert since.loaded > 0
    assert num_spliced(router) > before, "every first token was half a character"


def test_a_d_that_takes_no_token_ids_goes_on_behind_p_s_token_as_a_message(pair):
    """The prompt of the message has the ids of the prompt and of the token."""
    url = pair.p.url + "/v1/chat/completions"
    asked_for = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    for number in range(20):
        text = f"2 words and {number} words. " * 12
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
        asked = first_body(body) | asked_for
        answer = httpx.post(url, json=asked, timeout=ANSWER_S, trust_env=False).json()
        first = FirstChatToken.found_in(body, answer)
        if first is not None:
            break
    else:
        pytest.fail("every first token was half a character")
    rest = chat(pair.d, text, **first.rest_in_words(Asked("", body, {})).body)
    assert first.is_continued_by(rest[0])
    expected = said(chat(pair.d, text, cache_salt="in words"))
    begun = answer["choices"][0]
    assert begun["message"]["content"] + said(rest)["text"] == expected["text"]
    assert begun["token_ids"] + said(rest)["ids"] == expected["ids"]
