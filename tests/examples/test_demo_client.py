"""The demo's client: requests to instances, and how it reads their answers and counters."""

from __future__ import annotations

import json

import httpx
import pytest

from examples.demo import client
from examples.demo.client import Answer
from examples.demo.engines import ENGINES
from examples.demo.processes import DemoError

DEADLINE_S = 20
USED = {"loaded_tokens": 8, "computed_tokens": 1, "reason": None}


def test_a_stream_is_read_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"choices": [{"text": "a", "token_ids": [7], "logprobs": {"token_logprobs": [-1]}}]},
        {"choices": [{"text": "b", "token_ids": [8], "logprobs": {"token_logprobs": [-2]}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "pdstore": USED}},
    ]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    serve(monkeypatch, httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"])))
    answer = client.ask("http://d", "Hello", 2)
    assert (answer.text, answer.token_ids, answer.logprobs) == ("ab", [7, 8], [-1, -2])
    assert (answer.prompt_tokens, answer.usage["pdstore"]) == (9, USED)
    assert 0 < answer.ttft_s < DEADLINE_S


def test_a_text_may_hold_what_unicode_calls_the_end_of_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a\u2028b\x85c"
    event = {"choices": [{"text": text, "token_ids": [7], "logprobs": {"token_logprobs": [-1]}}]}
    lines = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n"
    serve(monkeypatch, httpx.Response(200, content=lines.encode()))
    assert client.ask("http://d", "Hello", 1).text == text


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(503, text="nobody"), "HTTP 503: nobody"),
        (httpx.Response(200, text='data: {"error": {"message": "lost"}}'), "broke off: lost"),
    ],
)
def test_an_error_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, message: str
) -> None:
    serve(monkeypatch, response)
    with pytest.raises(DemoError, match=message):
        client.ask("http://d", "Hello", 2)


def test_counters_are_read_by_name_and_label(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """# TYPE pdstore_tokens_total counter
pdstore_tokens_total{verb="loaded"} 5.0
pdstore_tokens_created{verb="loaded"} 1.7e9
# TYPE pdstore_slots_lent gauge
pdstore_slots_lent 3.0
"""
    serve(monkeypatch, httpx.Response(200, text=text))
    assert client.counters("http://d") == {"pdstore_tokens_total:loaded": 5.0}


def test_counters_have_one_name_whatever_labels_an_engine_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = """# TYPE pdstore_tokens_total counter
pdstore_tokens_total{engine="0",model_name="demo",verb="saved"} 5.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="demo"} 16.0
"""
    serve(monkeypatch, httpx.Response(200, text=text))
    expected = {"pdstore_tokens_total:saved": 5.0, "vllm:generation_tokens_total": 16.0}
    assert client.counters("http://d") == expected


def test_the_mini_engine_says_itself_how_it_came_to_an_answer() -> None:
    mini = ENGINES["mini"]
    answer = Answer(token_ids=[1, 2, 3], prompt_tokens=9, usage={"pdstore": USED})
    mini.explain(answer, {})
    assert (answer.loaded_tokens, answer.computed_tokens, answer.reason) == (8, 1, None)
    assert mini.computed({"mini_engine_computed_tokens_total": 6.0}, [answer, answer]) == 2


def test_vllm_s_counters_say_how_it_came_to_an_answer() -> None:
    vllm, source = ENGINES["vllm"], "vllm:prompt_tokens_by_source_total"
    counted = {
        f"{source}:local_compute": 5.0,
        f"{source}:external_kv_transfer": 4.0,
        "pdstore_misses_total:lost": 1.0,
        "pdstore_misses_total:corrupt": 0.0,
    }
    answer = Answer(prompt_tokens=9)
    vllm.explain(answer, counted)
    assert (answer.loaded_tokens, answer.computed_tokens, answer.reason) == (4, 5, "lost")
    assert vllm.computed(counted, [answer]) == 5
    vllm.explain(answer, {})
    assert (answer.loaded_tokens, answer.computed_tokens, answer.reason) == (0, 0, None)


def serve(monkeypatch: pytest.MonkeyPatch, response: httpx.Response) -> None:
    """Answers every call of the demo's client."""
    transport = httpx.MockTransport(lambda request: response)
    with_transport = httpx.Client(transport=transport)
    monkeypatch.setattr(client.httpx, "get", lambda url, **_: with_transport.get(url))
    monkeypatch.setattr(
        client.httpx, "stream", lambda verb, url, **options: with_transport.stream(verb, url)
    )
