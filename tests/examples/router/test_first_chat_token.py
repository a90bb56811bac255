"""FirstChatToken: which chats may begin with P's token, and how the two parts become one."""

from __future__ import annotations

from typing import Any

import pytest

from examples.router.first_chat_token import FirstChatToken
from examples.router.intake import Asked
from examples.router.refusal import Refusal

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
LOGPROBS = {"content": [{"token": " a", "logprob": -0.5, "bytes": [32, 97], "top_logprobs": []}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def answer(content: str | None = " a", finish_reason: str = "length", **more: Any) -> Any:
    """P's, to a prompt of three tokens; `more` goes into the message."""
    message = {"role": "assistant", "content": content, "refusal": None} | more
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {
        "id": "p",
        "created": 1,
        "object": "chat.completion",
        "choices": [choice | {"logprobs": None, "token_ids": [7]}],
        "usage": usage,
        "prompt_token_ids": [1, 2, 3],
        "kv_transfer_params": {"pdstore": {}},
    }


def first_of(body: dict[str, Any], **more: Any) -> FirstChatToken:
    first = FirstChatToken.of({"messages": MESSAGES} | body, answer(**more))
    assert first is not None
    return first


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "temperature": 0.7},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
    ],
)
def test_a_chat_of_text_can_be_continued(more: dict[str, Any]) -> None:
    assert FirstChatToken.can_continue({"messages": MESSAGES, "stream": True} | more)


@pytest.mark.parametrize(
    "more",
    [
        {"messages": None},
        {"messages": ["Hello"]},
        {"messages": [*MESSAGES, {"role": "user", "content": [IMAGE]}]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"prompt": "x"},
    ],
)
def test_images_tools_and_what_is_not_known_are_left_to_d(more: dict[str, Any]) -> None:
    assert not FirstChatToken.can_continue({"messages": MESSAGES} | more)


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        answer(content=None),
        answer(content=""),
        answer(content="\ufffd"),
        answer(reasoning="hm"),
        answer(tool_calls=[{}]),
    ],
)
def test_a_token_that_cannot_be_told_alone_is_left_to_d(given: Any) -> None:
    assert FirstChatToken.of({"messages": MESSAGES}, given) is None


@pytest.mark.parametrize(
    ("limits", "rest"),
    [
        ({}, {}),
        ({"max_tokens": 9}, {"max_tokens": 8}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 4}),
    ],
)
def test_d_is_asked_in_token_ids(limits: dict[str, Any], rest: dict[str, Any]) -> None:
    first = first_of(limits)
    asked = first.rest_of(Asked(CHAT, first.body, {"a": "b"}))
    assert asked.prompt_ids == [1, 2, 3, 7]
    assert asked.body == {"messages": MESSAGES, "return_token_ids": True} | rest
    probe = first.probe(Asked(CHAT, first.body | {"stream": True, "min_tokens": 3}, {}))
    assert (probe.body["stream"], probe.body["max_tokens"]) == (False, 1)
    assert "min_tokens" not in probe.body


def test_an_answer_to_the_messages_is_not_one_to_the_ids() -> None:
    first = first_of({"max_tokens": 9})
    assert not first.is_taken(answer())
    assert first.is_taken(answer() | {"prompt_token_ids": [1, 2, 3, 7]})
    with pytest.raises(Refusal):
        first.with_rest(answer())


@pytest.mark.parametrize("wants_ids", [True, False])
def test_a_whole_answer_is_put_together(wants_ids: bool) -> None:
    first = first_of({"max_tokens": 3, "logprobs": True, "return_token_ids": wants_ids})
    first.answer["choices"][0]["logprobs"] = LOGPROBS
    d = answer(content=" b", finish_reason="stop") | {"id": "d", "prompt_token_ids": [1, 2, 3, 7]}
    d["choices"][0] |= {"token_ids": [8], "logprobs": LOGPROBS}
    d["usage"] = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    whole = first.with_rest(d)
    assert (whole["id"], whole.get("prompt_token_ids")) == ("p", [1, 2, 3] if wants_ids else None)
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [choice] = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" a b", "stop")
    assert choice.get("token_ids") == ([7, 8] if wants_ids else None)
    assert choice["logprobs"] == {"content": LOGPROBS["content"] * 2}


def test_the_parts_of_a_stream_read_as_one() -> None:
    first = first_of({"max_tokens": 3, "stream": True})
    [part] = first.parts()
    assert part["object"] == "chat.completion.chunk"
    [choice] = part["choices"]
    assert choice["delta"] == {"role": "assistant", "content": " a"}
    assert choice["finish_reason"] is None
    assert "prompt_token_ids" not in part
    begins = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    later = first.next_part({"id": "d", "choices": [begins], "prompt_token_ids": [1, 2, 3, 7]})
    assert (later["id"], later["choices"][0]["delta"]) == ("p", {"content": ""})
    assert "prompt_token_ids" not in later
    with pytest.raises(Refusal):
        first.next_part({"id": "d", "choices": [begins], "prompt_token_ids": [1, 2, 3]})


@pytest.mark.parametrize(
    ("body", "reason"), [({"max_tokens": 1}, "length"), ({"max_tokens": 9}, "stop")]
)
def test_an_answer_of_one_token_is_ps(body: dict[str, Any], reason: str) -> None:
    first = first_of(body, finish_reason=reason, content="")
    assert first.is_last
    whole = first.whole()
    assert whole["choices"][0]["message"]["content"] == ""
    assert not {"kv_transfer_params", "prompt_token_ids"} & set(whole)
