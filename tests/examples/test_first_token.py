"""P's first token and D's answer behind it are what one instance answers, in every field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import anyio.to_thread
import pytest

from examples.mini_engine import prompt, server
from tests.examples.test_mini_server import PROMPT, TEMPLATE, Serving
from tests.support.mini_engine_kit import pd_of
from tests.support.router_kit import metric, routed

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def serving(checkpoint, store, *, state=False, **changes):
    """Yields one that works alone, P and D, over one pool."""
    pds = ({}, *(pd_of(role, store, **changes) for role in ("prefill", "decode")))
    made = [Serving(checkpoint, pd, state=state) for pd in pds]
    for each in made:
        each.engine.model.tokenizer.chat_template = TEMPLATE
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engines(checkpoint):
    with serving(checkpoint, "memory://spliced") as made:
        yield made


@pytest.fixture(scope="module")
def strict_hybrids(checkpoint):
    """Engines of a model with states, of which D must not compute what it does not find."""
    with serving(checkpoint, "memory://hybrids", state=True, on_miss="fail") as made:
        yield made


class Answers:
    """The answers to one request, of the instance that works alone and through the router."""

    def __init__(self, alone: str, spliced: str, num_spliced: float) -> None:
        self.alone, self.spliced = map(_parsed, (alone, spliced))
        self.num_spliced = num_spliced

    def assert_same(self) -> None:
        assert _plain(self.spliced) == _plain(self.alone)

    @property
    def cost(self) -> dict[str, Any]:
        """The cost of the answer to D, by its own words."""
        cost = next(part["usage"]["pdstore"] for part in self.spliced if part.get("usage"))
        return {name: cost[name] for name in ("loaded_tokens", "computed_tokens", "reason")}


def _parsed(text: str) -> list[dict[str, Any]]:
    if not text.startswith("data: "):
        return [json.loads(text)]
    *parts, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def _plain(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns all that is equal in two answers, of one part or of many; logprobs are rounded."""
    assert len({part["id"] for part in parts}) == 1
    choices = [choice for part in parts for choice in part["choices"]]
    logprobs = [choice["logprobs"] or {} for choice in choices]
    usage = parts[-1]["usage"]
    return {
        "text": "".join(_text_of(choice) for choice in choices),
        "finish_reasons": [c["finish_reason"] for c in choices if c["finish_reason"]],
        "prompt": next(filter(None, (one.get("prompt_token_ids") for one in parts + choices)), 0),
        "ids": [id for choice in choices for id in choice.get("token_ids", ())],
        "logprobs": _rounded({name: _all(logprobs, name) for name in logprobs[0]}),
        "usage": [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")],
    }


def _text_of(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta")
    return str(said["content"] if said else choice["text"])


def _all(logprobs: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for each in logprobs for value in each[name]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


async def ask(engines, **body: Any) -> Answers:
    alone, p, d = engines
    body = {"max_tokens": 9} | body
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if "messages" not in body:
        body = {"prompt": PROMPT} | body
    expected = await anyio.to_thread.run_sync(lambda: alone.client.post(path, json=body).text)
    async with routed([p.url], [d.url], first_token="prefill") as client:
        got = await client.post(path, json=body)
        num_spliced = await metric(client, "router_spliced_total")
    return Answers(expected, got.text, num_spliced)


def chat_of(num_words: int) -> dict[str, Any]:
    said = " ".join(f"word{(num_words + i) % 10}" for i in range(num_words))
    return {"messages": [{"role": "user", "content": said}]}


def prompt_of(num_tokens: int) -> list[int]:
    return [(37 * num_tokens + 11 * i) % 200 + 20 for i in range(num_tokens)]


def generated(serving: Serving) -> float:
    return serving.engine.counters.registry.get_sample_value("mini_engine_generated_tokens_total")


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
async def test_d_computes_p_s_token_alone_and_the_answer_is_that_of_one(engines, num_tokens):
    got = await ask(engines, prompt=prompt_of(num_tokens), logprobs=3, return_token_ids=True)
    got.assert_same()
    first = engines[0].ask(prompt=prompt_of(num_tokens), max_tokens=1)["choices"][0]["text"]
    is_spliced = first and "\ufffd" not in first  # else it is half a character
    loaded = num_tokens if is_spliced else num_tokens - 1
    assert got.cost == {"loaded_tokens": loaded, "computed_tokens": 1, "reason": None}


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize("stream", [{}, STREAM])
async def test_a_chat_is_answered_as_by_one(engines, stream, more):
    num_spliced = 0
    for num_words in (3, 30):
        got = await ask(engines, **chat_of(num_words), **stream, **more, return_token_ids=True)
        got.assert_same()
        assert got.cost["computed_tokens"] == 1
        num_spliced += got.num_spliced
    assert num_spliced > 0, "every first token was half a character"


@pytest.mark.parametrize("stream", [{}, STREAM])
async def test_an_answer_whose_first_token_ends_it_is_that_of_one(engines, stream, monkeypatch):
    alone = engines[0].ask(prompt=prompt_of(70), max_tokens=1, return_token_ids=True)
    for engine in engines:
        monkeypatch.setattr(engine.engine.model, "end_ids", set(alone["choices"][0]["token_ids"]))
    before = generated(engines[2])
    got = await ask(engines, prompt=prompt_of(70), **stream)
    got.assert_same()
    assert got.spliced[0]["choices"][0]["finish_reason"] == "stop"
    assert generated(engines[2]) == before


async def test_a_chat_of_a_hybrid_d_without_token_ids_is_handed_over(strict_hybrids, monkeypatch):
    """Were P asked to keep the last token, D would find no state before it, and refuse."""

    def without_ids(tokenizer, body):
        return prompt.prompt_of(tokenizer, body.model_copy(update={"kv_transfer_params": None}))

    monkeypatch.setattr(server, "prompt_of", without_ids)
    for num_words in (3, 30, 60):
        got = await ask(strict_hybrids, **chat_of(num_words))
        got.assert_same()
        assert (got.cost["computed_tokens"], got.num_spliced) == (1, 0)


@pytest.mark.parametrize("num_tokens", [2, 19, 61, 64, 127, 145, 193])
async def test_d_computes_one_token_of_a_hybrid_whatever_the_first_one_is(
    strict_hybrids, num_tokens
):
    got = await ask(strict_hybrids, prompt=prompt_of(num_tokens), logprobs=3)
    got.assert_same()
    assert got.cost["computed_tokens"] == 1
