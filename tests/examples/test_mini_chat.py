"""The mini engine's chat completions: the checkpoint's own template, and OpenAI's form."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.examples.test_mini_server import Serving

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "A block is stored under"}]
PROMPT = "user: A block is stored under\nassistant: "


@pytest.fixture(scope="module")
def serving(checkpoint):
    serving = Serving(checkpoint)
    yield serving
    serving.close()


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
    plain = serving.ask(prompt=PROMPT, max_tokens=6)
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


def test_a_checkpoint_without_a_template_says_what_to_do(serving, chat):
    serving.engine.model.tokenizer.chat_template = None
    response = chat()
    assert response.status_code == 400
    assert "no chat template: ask /v1/completions" in response.json()["error"]["message"]


def test_every_answer_is_of_openais_own_types(serving, chat):
    """With all fields that they demand, each of its type."""
    ChatCompletion.model_validate(chat(logprobs=True, top_logprobs=2).json(), strict=True)
    Completion.model_validate(serving.ask(prompt=PROMPT, max_tokens=6, logprobs=2), strict=True)
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
