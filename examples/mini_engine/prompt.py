"""prompt_of: the token ids of a request, from text, ids, or a conversation."""

from __future__ import annotations

from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from examples.mini_engine.protocol import Body, ChatBody, RefusedError


def prompt_of(tokenizer: PreTrainedTokenizerBase, body: Body | ChatBody) -> list[int]:
    """Returns a body's token ids. Raises RefusedError for messages that the template refuses.

    A chat may have them in its `kv_transfer_params`, as vLLM's may: then no prompt is made of the
    messages.
    """
    if isinstance(body, ChatBody):
        return _given_ids(body) or _chat_ids(tokenizer, body)
    if isinstance(body.prompt, str):
        return cast("list[int]", tokenizer(body.prompt)["input_ids"])
    return body.prompt


def _given_ids(body: ChatBody) -> list[int] | None:
    ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(id) is int for id in ids)):
        raise RefusedError("prompt_token_ids: not a list of token ids", param="kv_transfer_params")
    return ids


def _chat_ids(tokenizer: PreTrainedTokenizerBase, body: ChatBody) -> list[int]:
    if not tokenizer.chat_template:
        raise RefusedError(
            "this checkpoint has no chat template: ask /v1/completions, or serve a chat model",
            param="messages",
        )
    try:
        text = tokenizer.apply_chat_template(
            body.messages, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RefusedError(f"messages: {error}", param="messages") from error
    # the template has written the special tokens already
    return cast("list[int]", tokenizer(str(text), add_special_tokens=False)["input_ids"])
