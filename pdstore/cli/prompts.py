"""Prompts: the token ids of what `pdstore explain` is asked about: a text, a chat, or ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

from pdstore.errors import ConfigError, MissingExtra

_MAX_ID = (1 << 31) - 1
_GIVE = (
    "give --ids 1,2,3 (or a file of them), or a PROMPT or --chat FILE and its --model, or"
    " --request ID and --log FILE"
)
_OF_TEMPLATE = ("tools", "documents")
"""The fields of a chat request, beside its messages, that the template is given."""


class Prompt(NamedTuple):
    """A prompt as the user gave it: exactly one of `text`, `chat` and `ids`.

    model: the directory of the tokenizer for `text` and `chat`.
    chat: the path of a JSON file: messages, or the body of a request with `messages`.
    ids: token ids, or the answer of vLLM's /tokenize, or the path of a file of either.
    """

    text: str | None = None
    model: str | None = None
    ids: str | None = None
    chat: str | None = None

    def token_ids(self) -> list[int]:
        """Returns the ids. Raises ConfigError for what is no prompt, or without its tokenizer."""
        given = [each for each in (self.text, self.ids, self.chat) if each is not None]
        if len(given) != 1 or (self.ids is None and self.model is None):
            raise ConfigError(_GIVE)
        if self.ids is not None:
            return _ids_of(self.ids)
        tokenizer = _tokenizer_in(str(self.model))
        if self.chat is not None:
            return _ids_of_chat(self.chat, tokenizer)
        return cast("list[int]", tokenizer(self.text)["input_ids"])


def _tokenizer_in(model: str) -> Any:  # noqa: ANN401
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(
            "a text needs a tokenizer: pip install transformers, or give --ids"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:  # the error's text has many lines
        raise ConfigError(
            f"no tokenizer in {model}: give the model's directory by --model, or --ids"
        ) from error


def _ids_of_chat(path: str, tokenizer: Any) -> list[int]:  # noqa: ANN401
    """Returns the ids that a server computes: the chat template's, up to where the answer begins.

    A server's own `--chat-template` is not known here.
    """
    body = _chat_in(path)
    options = {name: body[name] for name in _OF_TEMPLATE if name in body}
    more = body.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ConfigError(f"--chat {path}: its chat_template_kwargs is no object")
    options |= more
    options["add_generation_prompt"] = body.get("add_generation_prompt", True)
    try:
        _parse_arguments(body["messages"])
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, **options)
        return cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # a template is a program, which raises what its author chose
        raise ConfigError(f"--chat {path}: the chat template says: {error}") from error


def _parse_arguments(messages: list[dict[str, Any]]) -> None:
    """Makes objects of the arguments of tool calls, which a request has as text, as vLLM does."""
    for message in messages:
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")


def _chat_in(path: str) -> dict[str, Any]:
    """Returns a request's body; one is made of a bare list of messages."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--chat {path}: no file of JSON: {error}") from error
    body: dict[str, Any] = {"messages": found}
    if isinstance(found, dict):
        body = found
    messages = body.get("messages")
    is_list = isinstance(messages, list) and len(messages) > 0
    if not is_list or not all(isinstance(each, dict) and "role" in each for each in messages or ()):
        raise ConfigError(
            f'--chat {path}: write [{{"role": "user", "content": "..."}}], or a request\'s body'
            " with such `messages`"
        )
    if any(isinstance(each.get("content"), list) for each in messages or ()):
        raise ConfigError(
            f"--chat {path}: a content is a list of parts, which the server puts together: vLLM's"
            " /tokenize gives its ids: give them by --ids"
        )
    return body


def _ids_of(text: str) -> list[int]:
    try:
        is_path = not text.lstrip().startswith("{") and not set(text) <= set("0123456789, []")
        listed = Path(text).read_text() if is_path else text
        found = json.loads(listed if listed.lstrip().startswith(("[", "{")) else f"[{listed}]")
        found = found["tokens"] if isinstance(found, dict) else found
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"--ids: {text[:40]!r} is neither ids nor a file of them") from error
    is_list = isinstance(found, list) and len(found) > 0
    if not is_list or not all(type(each) is int and 0 <= each <= _MAX_ID for each in found):
        raise ConfigError(f"--ids: {text[:40]!r} is no list of token ids")
    return cast("list[int]", found)
