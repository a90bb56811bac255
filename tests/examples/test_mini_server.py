"""The mini engine's HTTP: OpenAI's completions and chats, its errors, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from examples.make_checkpoint import ROOT
from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.server import HttpServer
from examples.ports import free_port
from pdstore import read_settings
from tests.docs.commands import commands
from tests.support.child import child
from tests.support.mini_engine_kit import DEADLINE_S, Gate, close, until

PROMPT = "A block is stored under its key"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "A block is stored under"}]
CHAT_PROMPT = "user: A block is stored under\nassistant: "


class Serving:
    """An engine behind real HTTP on a free port, in this process."""

    def __init__(self, checkpoint, pd=None, **options):
        settings = read_settings(**pd or {})
        self.engine = Engine(
            Config(
                model=checkpoint,
                settings=settings,
                num_blocks=32,
                max_num_batched_tokens=64,
                served_model_name="tiny",
                port=0,
                **options,
            )
        )
        self._server = HttpServer(self.engine)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def close(self):
        self.client.close()
        until(lambda: self.engine.cache.num_free == 32)
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        close(self.engine)

    def post(self, **body):
        return self.client.post("/v1/completions", json={"prompt": PROMPT, **body})

    def ask(self, **body):
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **body):
        """The parts of a stream; it must end as it should."""
        lines = self.post(stream=True, **body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture(scope="module")
def serving(checkpoint):
    serving = Serving(checkpoint)
    yield serving
    serving.close()


def test_the_request_of_the_quickstart_is_answered(serving):
    [line] = [c.line for c in commands() if c.line.startswith("curl ")]
    url, *options = shlex.split(line)[1:]
    headers = dict([option.split(": ") for option in options if ": " in option][:1])
    path = url.removeprefix("http://127.0.0.1:8000")
    answer = serving.client.post(path, content=options[-1], headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 24


def test_a_stream_says_the_same_in_parts(serving):
    options = {"max_tokens": 40, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    whole = serving.ask(**options)
    parts = serving.stream(**options, stream_options={"include_usage": True})
    choices = [part["choices"][0] for part in parts[:-1]]
    assert len(choices) == 41
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    ids = [id for choice in choices for id in choice["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        together = [one for choice in choices for one in choice["logprobs"][name]]
        expected = whole["choices"][0]["logprobs"][name]
        assert together == (pytest.approx(expected, abs=1e-4) if "token_l" in name else expected)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert {part["id"] for part in parts} == {parts[0]["id"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, r"\[0, \d+\)"),
        ({"prompt": [10**6]}, r"\[0, \d+\)"),
        ({"prompt": [10**30]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 4000}, r"max_tokens=4000 are over the context of 2048"),
        ({"prompt": [1] * 600}, r"600 prompt tokens .* KV cache of 512"),
        ({"temperature": 0.7}, "greedy"),
        ({"temperature": "hot"}, "greedy"),
        ({"n": 2}, "n:"),
        ({"echo": True}, "echo"),
        ({"stop": "."}, "stop"),
        ({"logprobs": 100}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
    ],
)
def test_bad_input_is_refused_in_openais_form(serving, body, words):
    response = serving.post(**body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"])
    assert serving.ask(max_tokens=1)


@pytest.mark.misconfiguration("`--served-model-name` differs on P or D")
def test_another_model_and_another_path_are_not_found(serving):
    response = serving.post(model="gpt-9")
    assert response.status_code == 404
    error = response.json()["error"]
    said = "the model 'gpt-9' does not exist: this is 'tiny' (--served-model-name)"
    assert (error["code"], error["message"]) == ("model_not_found", said)
    assert serving.client.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    assert serving.client.get("/v1/completions").status_code == 405
    assert serving.ask(model="tiny", temperature=0, seed=3, user="me", max_tokens=1)


def test_a_client_that_goes_ends_its_request(serving, monkeypatch):
    gate = Gate(serving.engine, monkeypatch)

    async def come_and_go(body):
        async with httpx.AsyncClient(base_url=serving.client.base_url) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            assert await asyncio.to_thread(gate.arrived.acquire, timeout=DEADLINE_S)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    for stream in (False, True):
        asyncio.run(come_and_go({"prompt": "x", "max_tokens": 400, "stream": stream}))
        request = serving.engine.scheduler.running[0]
        until(lambda request=request: request.is_aborted)
        gate.open(1)
        until(lambda: serving.engine.cache.num_free == 32)
        assert len(request.output_ids) == 1


@pytest.fixture
def chat(serving):
    """Asks with the template; without it where a test takes it away."""
    tokenizer = serving.engine.model.tokenizer
    tokenizer.chat_template = TEMPLATE

    def asked(**body):
        body = {"messages": MESSAGES, "max_tokens": 6, **body}
        return serving.client.post("/v1/chat/completions", json=body)

    yield asked
    tokenizer.chat_template = None


def test_a_conversation_is_answered_as_its_text_would_be(serving, chat):
    answer = chat().json()
    [choice] = answer["choices"]
    plain = serving.ask(prompt=CHAT_PROMPT, max_tokens=6)
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    assert choice["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: no tools"),
        ({"tools": [{}]}, "tools: "),
        ({"kv_transfer_params": {"prompt_token_ids": ["a"]}}, "prompt_token_ids: "),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_field(chat, body, said):
    response = chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(said)


@pytest.mark.misconfiguration("chat with a checkpoint that has no template")
def test_a_checkpoint_without_a_template_says_what_to_do(serving, chat):
    serving.engine.model.tokenizer.chat_template = None
    response = chat()
    assert response.status_code == 400
    assert "no chat template: ask /v1/completions" in response.json()["error"]["message"]


def test_every_answer_is_of_openais_own_types(serving, chat):
    """With all fields that they demand, each of its type."""
    ChatCompletion.model_validate(chat(logprobs=True, top_logprobs=2).json(), strict=True)
    Completion.model_validate(
        serving.ask(prompt=CHAT_PROMPT, max_tokens=6, logprobs=2), strict=True
    )
    lines = [line for line in chat(stream=True).text.splitlines() if line.startswith("data: {")]
    assert lines
    for line in lines:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)


def test_openais_own_client_is_answered(serving, chat):
    with openai.OpenAI(base_url=str(serving.client.base_url.join("/v1")), api_key="none") as client:
        asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 6}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        parts = list(client.chat.completions.create(**asked, stream=True))
        [model] = client.models.list().data
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(**{**asked, "messages": []})
    assert whole == chat().json()["choices"][0]["message"]["content"]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert model.id == "tiny"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_the_process_cleanly(checkpoint, number):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started("--model", checkpoint, "--port", port, "--num-blocks", 16) as process:
        until(lambda: is_healthy(url, process))
        leave_within_the_body(port)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert "Traceback" not in process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 0


def leave_within_the_body(port):
    """Asks as a client does that goes away while it sends; that is no error of the engine."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")


def test_a_bad_command_line_is_one_clear_line_and_exit_code_2():
    with started("--model", "nowhere") as process:
        said = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 2
    assert said == "mini_engine: --model nowhere: no checkpoint there (no config.json)\n"


@pytest.mark.misconfiguration("the mini engine's API and the status page have one port")
def test_one_port_for_the_api_and_the_status_page_is_refused_with_both_names(checkpoint):
    port = free_port()
    on = {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STATUS_PORT": str(port)}
    with started("--model", checkpoint, "--port", port, "--store", "memory://", **on) as process:
        said = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 2
    assert said.startswith(
        f"mini_engine: PDSTORE_STATUS_PORT={port} and --port {port} are one port"
    )


def started(*options, **environment):
    command = [sys.executable, "-m", "examples.mini_engine", *map(str, options)]
    env = os.environ | environment
    return child(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)


def is_healthy(url, process):
    assert process.poll() is None, process.stderr.read()
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
