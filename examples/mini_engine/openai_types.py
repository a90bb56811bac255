"""OpenAI's types of answers, with the fields that vLLM adds to them and one of pdstore's."""

from __future__ import annotations

from typing import Any

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice as MessageChoice
from openai.types.chat.chat_completion_chunk import Choice as DeltaChoice

Json = dict[str, Any]


class Usage(CompletionUsage):
    """The tokens of a request. pdstore: those that came from the pool, and why no more did."""

    pdstore: Json


class VllmsChoice(BaseModel):
    """A choice with vLLM's additions. finish_reason: `abort` too, and None in a stream."""

    finish_reason: str | None
    token_ids: list[int] | None = None


class Text(VllmsChoice, CompletionChoice):  # type: ignore[misc]
    """A choice of a completion. prompt_token_ids: here and not in the answer, as in vLLM."""

    prompt_token_ids: list[int] | None = None


class Message(VllmsChoice, MessageChoice):  # type: ignore[misc]
    """A choice of a chat completion."""


class Delta(VllmsChoice, DeltaChoice):  # type: ignore[misc]
    """A choice in a stream of a chat completion."""


class VllmsAnswer(BaseModel):
    """An answer with vLLM's additions."""

    prompt_token_ids: list[int] | None = None
    kv_transfer_params: Json | None = None


class TextCompletion(VllmsAnswer, Completion):
    """An answer to /v1/completions, or a part of one."""


class MessageCompletion(VllmsAnswer, ChatCompletion):
    """An answer to /v1/chat/completions."""


class MessageChunk(VllmsAnswer, ChatCompletionChunk):
    """A part of an answer to /v1/chat/completions."""


class ServedModel(Model):
    """A line of /v1/models. max_model_len: most tokens of a prompt and its answer."""

    max_model_len: int


AnyAnswer = TextCompletion | MessageCompletion | MessageChunk


def json_of(answer: BaseModel) -> str:
    """Returns an answer as JSON: the fields that were set, those of nested types included."""
    return answer.model_dump_json(exclude_unset=True, serialize_as_any=True)
