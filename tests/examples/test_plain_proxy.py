"""D loads the prompt behind any proxy that relays P's parameters."""

from __future__ import annotations

import contextlib
import json
import re
import shlex

import anyio
import httpx
import pytest
from starlette.testclient import TestClient

from examples.plain_proxy import make_app
from tests.examples.test_mini_server import TEMPLATE, Serving
from tests.support.mini_engine_kit import pd_of, until
from tests.support.other_routers import REPLAYED, SGLangRouter
from tests.support.router_kit import BODY, Fake, Servers, routed

PROMPT = "A block is stored under its key, and " * 5


@pytest.fixture(scope="module")
def pair(checkpoints, tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('pool')}"
    p, d = (Serving(checkpoints["llama"], pd_of(role, url)) for role in ("prefill", "decode"))
    for one in (p, d):
        one.engine.model.tokenizer.chat_template = TEMPLATE
    yield p, d
    p.close()
    d.close()


def said(response) -> dict:
    """The last part of an answer that has a usage: of a stream, or the whole."""
    assert response.status_code == 200, response.text
    lines = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    return next(part for part in reversed(parts) if part.get("usage"))


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("proxy", REPLAYED)
def test_d_loads_the_prompt_behind_any_proxy(pair, proxy, is_chat, is_stream):
    p, d = pair
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    text = f"{proxy.__name__} {is_stream}: {PROMPT}"
    asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body = {"model": "tiny", **asked, "max_tokens": 5, "stream": is_stream}
    body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    headers = {"x-request-id": proxy.request_id}
    answered = said(p.client.post(path, json=proxy.ask_p(body), headers=headers))
    asks_for_all = issubclass(proxy, SGLangRouter)
    assert answered["usage"]["completion_tokens"] == (5 if asks_for_all else 1)

    def computed_by_d() -> int:
        ask_d = proxy.ask_d(body, answered)
        usage = said(d.client.post(path, json=ask_d, headers=headers))["usage"]
        assert usage["completion_tokens"] == 5
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == usage["prompt_tokens"] - usage["pdstore"]["computed_tokens"]
        return usage["pdstore"]["computed_tokens"]

    if proxy.waits:
        assert computed_by_d() == 1
    else:
        until(lambda: computed_by_d() == 1)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_d_loads_the_prompt_behind_the_plain_proxy(pair, is_stream):
    body = {"prompt": f"plain {is_stream}: {PROMPT}", "max_tokens": 5, "stream": is_stream}
    body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    with TestClient(make_app(*(one.url for one in pair))) as client:
        answer = client.post("/v1/completions", json=body)
    assert said(answer)["usage"]["pdstore"]["computed_tokens"] == 1
    assert answer.headers["content-type"].startswith("text/event-stream") == is_stream


@pytest.mark.misconfiguration("a proxy before P strips `kv_transfer_params`")
@pytest.mark.anyio
async def test_the_line_that_the_router_proposes_shows_whether_p_hands_over(pair, caplog):
    p, d = pair
    async with routed([Fake()], [Fake()]) as client:
        await client.post("/v1/completions", json=BODY)
    [line] = re.findall(r"curl .*}}'", caplog.text)
    *_, body = shlex.split(line)
    answers = [each.client.post("/v1/completions", content=body).json() for each in (p, d)]
    assert ["kv_transfer_params" in each for each in answers] == [True, False]


@pytest.mark.anyio
async def test_p_computes_one_token_whatever_the_answers_length_and_number():
    p, d = Fake(), Fake()
    body = {"messages": [], "max_completion_tokens": 40, "n": 3, "best_of": 4}
    with contextlib.ExitStack() as stack:
        async with anyio.create_task_group() as group, httpx.AsyncClient() as client:
            servers = Servers(group, stack)
            proxy = servers.start(make_app(servers.start(p.app), servers.start(d.app)))
            await client.post(f"{proxy}/v1/chat/completions", json=body)
            servers.stop()
    assert p.bodies[0]["max_tokens"] == 1
    assert not {"max_completion_tokens", "n", "best_of"} & p.bodies[0].keys()
    assert d.bodies == [body]
