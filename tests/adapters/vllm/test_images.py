"""Images: equal placeholders of different images never share KV, those of the same image do."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.adapters.vllm.asking import ANSWER_S, MAX_DIFFERENCE, Since, assert_idle
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.vllm_vision import IMAGE_TOKENS, PIXELS, make_vision

UNCACHED = (*CACHING, "--mm-processor-cache-gb=0")
UNHASHED = ("--no-enable-prefix-caching", "--mm-processor-cache-gb=0")


@pytest.fixture
def instances(launcher, tmp_path, request):
    """A P and a D; an indirect parameter is their options."""
    model = make_vision(tmp_path / "llava")
    pool, options = f"file://{tmp_path / 'pool'}", getattr(request, "param", ())
    servers = [
        launcher.vllm(f"vision-{role}", model, *options, env=switched_on(pool, role))
        for role in ("prefill", "decode")
    ]
    yield [server.wait_ready() for server in servers]
    for server in servers:
        server.stop()


def picture(seed: int) -> str:
    """A data URL of random pixels."""
    data = random.Random(seed).randbytes(3 * PIXELS * PIXELS)
    file = io.BytesIO()
    Image.frombytes("RGB", (PIXELS, PIXELS), data).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(server, text: str, seed: int, uuid: str | None = None, **more: Any) -> dict[str, Any]:
    """The answer about a picture, under the name that a client gives it."""
    named = {} if uuid is None else {"uuid": uuid}
    content = [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": picture(seed)}, **named},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        **more,
    }
    url = server.url + "/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]


def assert_same(answer: dict[str, Any], other: dict[str, Any]) -> None:
    assert answer["choices"][0]["message"] == other["choices"][0]["message"]
    assert logprobs_of(answer) == pytest.approx(logprobs_of(other), abs=MAX_DIFFERENCE)


@pytest.mark.nightly
def test_only_the_same_image_is_a_hit(instances):
    p, d = instances
    text = "what is it? " * 20
    asked = ask(p, text, 1, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params, num_tokens = asked["kv_transfer_params"], asked["usage"]["prompt_tokens"]
    assert num_tokens >= IMAGE_TOKENS + len(text)
    assert_idle(p)
    one, other = (ask(d, text, seed, cache_salt=f"salt {seed}") for seed in (1, 2))
    assert max(abs(a - b) for a, b in zip(*map(logprobs_of, (one, other)), strict=True)) > 0.01

    since = Since(d)
    assert_same(ask(d, text, 2, kv_transfer_params=params), other)
    assert since.loaded == 0
    for more in ({"kv_transfer_params": params}, {}):
        since = Since(d)
        assert_same(ask(d, text, 1, **more), one)
        assert since.loaded == num_tokens
        assert since.computed <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("instances", [UNHASHED], indirect=True)
def test_where_vllm_only_numbers_images_the_first_of_p_is_not_the_first_of_d(instances):
    p, d = instances
    text = "what is it? " * 20
    ask(p, text, 1, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert_idle(p)
    since = Since(d)
    answer = ask(d, text, 2)
    assert since.loaded == 0
    assert_same(answer, ask(d, text, 2, cache_salt="alone"))


@pytest.mark.nightly
@pytest.mark.parametrize("instances", [(), UNCACHED], indirect=True)
def test_d_never_gets_one_picture_for_another_of_the_same_name(instances):
    """P's vLLM takes the second for the first: by its cache of processed pictures, or of KV."""
    p, d = instances
    text, params = "what is it? " * 20, None
    alone = ask(d, text, 2, cache_salt="alone")
    for seed in (1, 2):
        hand_off = {"do_remote_decode": True}
        answer = ask(p, text, seed, "img-0", max_tokens=1, kv_transfer_params=hand_off)
        params = answer["kv_transfer_params"]
    assert_idle(p)
    since = Since(d)
    assert_same(ask(d, text, 2, "img-0", kv_transfer_params=params), alone)
    assert since.loaded == 0
