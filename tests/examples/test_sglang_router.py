"""SGLang's router in front of two instances on one pool."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys

import httpx
import pytest

from examples.ports import free_port
from tests.examples.test_mini_server import TEMPLATE, Serving
from tests.support.child import child
from tests.support.kv import eventually
from tests.support.mini_engine_kit import pd_of

PROMPT = "A block is stored under its key, and " * 5
START_S = 60
BLOCK = 64

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def instances(checkpoints, tmp_path_factory):
    """Two instances, each of which saves and loads."""
    url = f"file://{tmp_path_factory.mktemp('pool')}"
    both = [Serving(checkpoints["llama"], pd_of("both", url)) for _ in range(2)]
    for one in both:
        one.engine.model.tokenizer.chat_template = TEMPLATE
    yield both
    for one in both:
        one.close()


@contextlib.contextmanager
def routed(directory, *options: str):
    """Yields a client of SGLang's router, once it sends requests on."""
    port, metrics, log = free_port(), free_port(), directory / "router.log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), *options]
    with log.open("wb") as out, child(command, stdout=out, stderr=subprocess.STDOUT) as process:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return client.get("/readiness").status_code == 200
            return False

        with client:
            eventually(is_ready, START_S, log.read_text)
            yield client


def tokens_of(instance, kind: str) -> int:
    """The tokens that an instance has `computed`, or `generated`, until now."""
    shown = instance.client.get("/metrics").text
    [number] = re.findall(rf"^mini_engine_{kind}_tokens_total (\S+)", shown, re.MULTILINE)
    return int(float(number))


def ask(client, *, is_chat=False, text=PROMPT):
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    answer = client.post(path, json={"model": "tiny", **asked, "max_tokens": 5})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_an_instance_loads_what_another_one_has_computed(instances, tmp_path, is_chat):
    """Whole blocks at least; the last tokens of a prompt are stored for hand-offs alone."""
    numbers = itertools.count()

    def loads_from_the_other() -> bool:
        text = f"{is_chat} {next(numbers)}: {PROMPT}"
        before = [tokens_of(one, "generated") for one in instances]
        first = ask(client, is_chat=is_chat, text=text)
        for one in instances:
            eventually(lambda one=one: one.engine.cache.num_free == 32, 30)
        second = ask(client, is_chat=is_chat, text=text)
        assert first["choices"] == second["choices"]
        generated = [tokens_of(one, "generated") for one in instances]
        if [now - was for now, was in zip(generated, before, strict=True)] != [5, 5]:
            return False  # one instance got both
        number = first["usage"]["prompt_tokens"]
        assert first["usage"]["pdstore"]["computed_tokens"] > number - BLOCK
        return second["usage"]["pdstore"]["computed_tokens"] <= max(1, number % BLOCK)

    urls = [one.url for one in instances]
    with routed(tmp_path, "--worker-urls", *urls, "--policy", "round_robin") as client:
        eventually(loads_from_the_other, 30)


def test_in_its_pd_mode_both_answer_the_whole_request(instances, tmp_path):
    p, d = instances
    before = [tokens_of(one, "generated") for one in instances]
    with routed(tmp_path, "--pd-disaggregation", "--prefill", p.url, "--decode", d.url) as client:
        assert ask(client, text=f"together: {PROMPT}")["usage"]["completion_tokens"] == 5
    for one, was in zip(instances, before, strict=True):
        eventually(lambda one=one, was=was: tokens_of(one, "generated") == was + 5, 30)
