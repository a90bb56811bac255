"""Answer: turns tokens into text and into OpenAI's answer, whole or in parts."""

from __future__ import annotations

import time
import uuid

from openai.types import CompletionChoice
from openai.types.chat import ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as DeltaChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as DeltaLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from transformers import PreTrainedTokenizerBase

from examples.mini_engine.openai_types import (
    AnyAnswer,
    Delta,
    Json,
    Message,
    MessageChunk,
    MessageCompletion,
    Text,
    TextCompletion,
    Usage,
)
from examples.mini_engine.protocol import ChatBody, Options
from examples.mini_engine.request import Request, Token

_HALF_CHARACTER = "\ufffd"
_CONTEXT_TOKENS = 4


class Answer:
    """The answer to one request: `add` takes tokens, `part` returns those since the last part."""

    prefix = "cmpl"
    _has_prompt_in_choice = True  # as in vLLM

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, body: Options, request: Request
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._request = request
        # The last tokens whose text is complete: a token may read otherwise after another one.
        self._context = request.prompt[-_CONTEXT_TOKENS:]
        self._pending: list[int] = []  # tokens after them, which may end in half a character
        self._tokens: list[Token] = []
        self._offsets: list[int] = []
        self._text = ""
        self._num_chars = 0  # of earlier parts
        self._is_first = True
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, token: Token) -> None:
        self._tokens.append(token)
        self._offsets.append(self._num_chars + len(self._text))
        self._pending.append(token.id)
        text = self._new_text()
        if not text.endswith(_HALF_CHARACTER):
            self._text += text
            self._context, self._pending = self._pending, []

    def part(self, finish_reason: str | None = None) -> AnyAnswer:
        """Returns the tokens and the text since the last part.

        Text that ends in half a character waits for its other half, but not with a finish reason.
        """
        if finish_reason is not None:
            self._text += self._new_text()
        choice: Json = {"index": 0, "finish_reason": finish_reason}
        more: Json = {}
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in self._tokens]
            prompt = self._request.prompt if self._is_first else None
            (choice if self._has_prompt_in_choice else more)["prompt_token_ids"] = prompt
        if finish_reason is not None and self._request.answer_params is not None:
            more["kv_transfer_params"] = self._request.answer_params
        part = self._answer(choice, more)
        self._num_chars += len(self._text)
        self._text, self._tokens, self._offsets, self._is_first = "", [], [], False
        return part

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    def end(self, finish_reason: str) -> list[AnyAnswer]:
        """Returns the last parts of a stream, with the usage if asked for, or the whole answer."""
        last = self.part(finish_reason)
        if not self.is_stream:
            last.usage = self._usage()
            return [last]
        options = self._body.stream_options
        if not (options and options.include_usage):
            return [last]
        return [last, self._answer(None, {"usage": self._usage()})]

    def _answer(self, choice: Json | None, more: Json) -> AnyAnswer:
        """Returns an answer with the text since the last part.

        choice: fields of its only choice; None: there is none. more: fields beside the choices.
        """
        choices: list[CompletionChoice] = []
        if choice is not None:
            choices = [Text(text=self._text, logprobs=self._logprobs(), **choice)]
        return TextCompletion(object="text_completion", choices=choices, **self._head, **more)

    def _usage(self) -> Usage:
        request = self._request
        num_prompt, num_output = len(request.prompt), len(request.output_ids)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=request.num_loaded),
            pdstore={
                "loaded_tokens": request.num_loaded,
                "computed_tokens": request.num_prefill_tokens,
                "reason": request.miss_reason,
                **self._request.decided,
            },
        )

    def _new_text(self) -> str:
        """Returns the text of the pending tokens as it reads after the tokens before them."""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _logprobs(self) -> Logprobs | None:
        if self._request.num_logprobs is None:
            return None
        return Logprobs(
            tokens=[self._decode([token.id]) for token in self._tokens],
            token_logprobs=[token.logprob for token in self._tokens],
            top_logprobs=[
                {self._decode([id]): logprob for id, logprob in reversed(token.top)}
                for token in self._tokens
            ],
            text_offset=self._offsets,
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class ChatAnswer(Answer):
    """The answer to a conversation: the next message, whole or in parts."""

    prefix = "chatcmpl"
    _has_prompt_in_choice = False

    def _answer(self, choice: Json | None, more: Json) -> AnyAnswer:
        told = self._told_logprobs()
        fields = {**self._head, **more}
        if not self.is_stream:
            message = ChatCompletionMessage(role="assistant", content=self._text)
            logprobs = None if told is None else ChoiceLogprobs(content=told)
            whole = Message(message=message, logprobs=logprobs, **(choice or {}))
            return MessageCompletion(object="chat.completion", choices=[whole], **fields)
        parts: list[DeltaChoice] = []
        if choice is not None:
            delta = ChoiceDelta(role="assistant", content=self._text)
            part_logprobs = None if told is None else DeltaLogprobs(content=told)
            parts = [Delta(delta=delta, logprobs=part_logprobs, **choice)]
        return MessageChunk(object="chat.completion.chunk", choices=parts, **fields)

    def _told_logprobs(self) -> list[ChatCompletionTokenLogprob] | None:
        if self._request.num_logprobs is None:
            return None
        return [
            ChatCompletionTokenLogprob(
                **self._told(token.id, token.logprob),
                top_logprobs=[TopLogprob(**self._told(*likely)) for likely in token.top],
            )
            for token in self._tokens
        ]

    def _told(self, id: int, logprob: float) -> Json:
        text = self._decode([id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def answer_of(
    tokenizer: PreTrainedTokenizerBase, model: str, body: Options, request: Request
) -> Answer:
    """Returns the answer that a body asks for."""
    kind = ChatAnswer if isinstance(body, ChatBody) else Answer
    return kind(tokenizer, model, body, request)
