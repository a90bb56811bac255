"""FirstToken: which answers may begin with P's token, and how the two parts become one."""

from __future__ import annotations

from typing import Any

import pytest

from examples.router.first_token import FirstToken
from examples.router.intake import Asked

LOGPROBS = {
    "tokens": [" a"],
    "token_logprobs": [-0.5],
    "top_logprobs": [{" a": -0.5}],
    "text_offset": [0],
}


def answer(text: str = " a", finish_reason: str = "length", **more: Any) -> dict[str, Any]:
    """P's, to a prompt of three tokens."""
    ids = {"token_ids": [7], "prompt_token_ids": [1, 2, 3]}
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None, **ids}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    head = {"id": "p", "created": 1, "kv_transfer_params": {"pdstore": {}}}
    return {**head, "choices": [choice | more], "usage": usage}


def first_of(body: dict[str, Any], **more: Any) -> FirstToken:
    first = FirstToken.of(body, answer(**more))
    assert first is not None
    return first


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt": [1, 2, 3]},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 3, "ignore_eos": True, "stream": True},
        {"n": 1, "stop": None, "seed": None, "presence_penalty": 0.0, "stop_token_ids": [5]},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_what_is_chosen_token_by_token_can_be_continued(more: dict[str, Any]) -> None:
    assert FirstToken.can_continue({"model": "m", "prompt": "x", "max_tokens": 5} | more)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"stop": ["a b"]},
        {"seed": 1},
        {"presence_penalty": 0.5},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": None},
        {"response_format": {"type": "json_object"}},
        {"some_new_field": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_what_depends_on_the_answer_so_far_is_not(more: dict[str, Any]) -> None:
    assert not FirstToken.can_continue({"prompt": "x", "max_tokens": 5} | more)


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"choices": []},
        {"choices": [{"text": "a"}]},
        answer(text=""),
        answer(text="\ufffd"),
        answer(text="a\ufffd"),
        answer(token_ids=[1, 2]),
    ],
)
def test_a_token_that_cannot_be_told_alone_is_left_to_d(given: dict[str, Any] | None) -> None:
    assert FirstToken.of({"prompt": "x"}, given) is None


@pytest.mark.parametrize(
    ("body", "finish_reason"), [({"max_tokens": 1}, "length"), ({"max_tokens": 9}, "stop")]
)
def test_an_answer_of_one_token_is_ps(body: dict[str, Any], finish_reason: str) -> None:
    body |= {"prompt": "x", "stream_options": {"include_usage": True}}
    first = first_of(body, finish_reason=finish_reason, text="")
    assert first.is_last
    whole = first.whole()
    assert "kv_transfer_params" not in whole
    assert (whole["id"], whole["usage"]) == ("p", answer()["usage"])
    [choice] = whole["choices"]
    assert choice == {"index": 0, "text": "", "finish_reason": finish_reason, "logprobs": None}
    told, usage = first.parts()
    assert told["choices"] == [choice]
    assert (usage["choices"], usage["usage"]) == ([], answer()["usage"])


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ({"max_tokens": 9}, {"max_tokens": 8}),
        ({}, {"max_tokens": 15}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"max_tokens": 9, "min_tokens": 3}, {"max_tokens": 8, "min_tokens": 2}),
        ({"max_tokens": 9, "min_tokens": 0}, {"max_tokens": 8, "min_tokens": 0}),
    ],
)
def test_d_is_asked_for_the_rest(body: dict[str, Any], rest: dict[str, Any]) -> None:
    body |= {"prompt": "x", "model": "m"}
    first = first_of(body)
    assert not first.is_last
    asked = first.rest_of(Asked("/v1/completions", body, {}))
    assert asked.body == {"prompt": [1, 2, 3, 7], "model": "m"} | rest


def test_a_whole_answer_is_put_together() -> None:
    body = {"prompt": "x", "max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    first = first_of(body, logprobs=LOGPROBS)
    later = {
        "tokens": [" b", " c"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{" b": -1.0}, {" c": -2.0}],
        "text_offset": [0, 2],
    }
    d = answer(text=" b c", finish_reason="stop", logprobs=later) | {"id": "d", "created": 9}
    d["choices"][0] |= {"token_ids": [8, 9], "prompt_token_ids": [1, 2, 3, 7]}
    d["usage"] = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    whole = first.with_rest(d)
    assert (whole["id"], whole["created"]) == ("p", 1)
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" a b c", "stop")
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([7, 8, 9], [1, 2, 3])
    assert choice["logprobs"] == {
        "tokens": [" a", " b", " c"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{" a": -0.5}, {" b": -1.0}, {" c": -2.0}],
        "text_offset": [0, 2, 4],
    }


def test_the_parts_of_a_stream_read_as_one() -> None:
    body = {"prompt": "x", "max_tokens": 3, "logprobs": 1, "stream": True, "return_token_ids": True}
    first = first_of(body, logprobs=LOGPROBS)
    [part] = first.parts()
    [choice] = part["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (" a", None, [7])
    assert choice["prompt_token_ids"] == [1, 2, 3]
    d = answer(text=" b", finish_reason="stop", logprobs=LOGPROBS) | {"id": "d"}
    d["choices"][0] |= {"prompt_token_ids": [1, 2, 3, 7]}
    d["usage"] = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    later = first.next_part(d)
    assert later["id"] == "p"
    assert later["choices"][0]["prompt_token_ids"] is None
    assert later["choices"][0]["logprobs"]["text_offset"] == [2]
    assert later["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
