"""Answer: turns tokens into text and into OpenAI's answer, whole or in parts."""

from __future__ import annotations

import time
import uuid
from typing import Any

from transformers import PreTrainedTokenizerBase

from examples.mini_engine.protocol import ChatBody, Options
from examples.mini_engine.request import Request, Token

Json = dict[str, Any]

_HALF_CHARACTER = "\ufffd"
_CONTEXT_TOKENS = 4


class Answer:
    """The answer to one request: `add` takes tokens, `part` returns those since the last part."""

    prefix = "cmpl"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, body: Options, request: Request
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._request = request
        # The last tokens whose text is complete: a word's beginning is told by what is before it.
        self._context = request.prompt[-_CONTEXT_TOKENS:]
        self._pending: list[int] = []  # tokens after them, which may end in half a character
        self._tokens: list[Token] = []
        self._offsets: list[int] = []
        self._text = ""
        self._num_chars = 0  # of earlier parts
        self._is_first = True
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
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

    def part(self, finish_reason: str | None = None) -> Json:
        """Returns the tokens and the text since the last part.

        Text that ends in half a character waits for its other half, but not with a finish reason.
        """
        if finish_reason is not None:
            self._text += self._new_text()
        choice: Json = {"index": 0, "finish_reason": finish_reason, **self._content()}
        part: Json = {**self._head, "choices": [choice]}
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in self._tokens]
            prompt = self._request.prompt if self._is_first else None
            self._place_of_prompt(part)["prompt_token_ids"] = prompt
        if finish_reason is not None and self._request.answer_params is not None:
            part["kv_transfer_params"] = self._request.answer_params
        self._num_chars += len(self._text)
        self._text, self._tokens, self._offsets, self._is_first = "", [], [], False
        return part

    @property
    def kind(self) -> str:
        """OpenAI's name of the answer's form."""
        return "text_completion"

    @property
    def is_stream(self) -> bool:
        return bool(self._body.stream)

    def end(self, finish_reason: str) -> list[Json]:
        """Returns the last parts of a stream, with the usage if asked for, or the whole answer."""
        last = self.part(finish_reason)
        usage = {**self._head, "choices": [], "usage": self._usage()}
        if not self.is_stream:
            return [{**usage, **last}]
        options = self._body.stream_options
        return [last, usage] if options and options.include_usage else [last]

    def _content(self) -> Json:
        """Returns the part of a choice that holds the text since the last part."""
        wants_logprobs = self._request.num_logprobs is not None
        return {"text": self._text, "logprobs": self._logprobs() if wants_logprobs else None}

    def _place_of_prompt(self, part: Json) -> Json:
        """Returns the part of the answer that shows the prompt's ids: the choice, as in vLLM."""
        choice: Json = part["choices"][0]
        return choice

    def _usage(self) -> Json:
        request = self._request
        num_prompt, num_output = len(request.prompt), len(request.output_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": request.num_loaded},
            "pdstore": {
                "loaded_tokens": request.num_loaded,
                "computed_tokens": request.num_fed,
                "reason": request.miss_reason,
                **self._decision(),
            },
        }

    def _decision(self) -> Json:
        """Returns what was decided for what the pool had; nothing if it had nothing."""
        decision = self._request.decision
        if decision is None or decision.way == "none":
            return {}
        return {
            "decision": decision.way,
            "estimated_load_s": decision.load_s,
            "estimated_compute_s": decision.compute_s,
            "took_s": self._request.took_s,
        }

    def _new_text(self) -> str:
        """Returns the text of the pending tokens as it reads after the tokens before them."""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _logprobs(self) -> Json:
        return {
            "tokens": [self._decode([token.id]) for token in self._tokens],
            "token_logprobs": [token.logprob for token in self._tokens],
            "top_logprobs": [
                {self._decode([id]): logprob for id, logprob in reversed(token.top)}
                for token in self._tokens
            ],
            "text_offset": self._offsets,
        }

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class ChatAnswer(Answer):
    """The answer to a conversation: the next message, whole or in parts."""

    prefix = "chatcmpl"

    @property
    def kind(self) -> str:
        return "chat.completion.chunk" if self.is_stream else "chat.completion"

    def _content(self) -> Json:
        said = {"role": "assistant", "content": self._text}
        logprobs = None if self._request.num_logprobs is None else self._logprobs()
        return {"delta" if self.is_stream else "message": said, "logprobs": logprobs}

    def _place_of_prompt(self, part: Json) -> Json:
        return part

    def _logprobs(self) -> Json:
        told = [
            self._told(token.id, token.logprob)
            | {"top_logprobs": [self._told(*likely) for likely in token.top]}
            for token in self._tokens
        ]
        return {"content": told}

    def _told(self, id: int, logprob: float) -> Json:
        text = self._decode([id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def answer_of(
    tokenizer: PreTrainedTokenizerBase, model: str, body: Options, request: Request
) -> Answer:
    """Returns the answer that a body asks for."""
    kind = ChatAnswer if isinstance(body, ChatBody) else Answer
    return kind(tokenizer, model, body, request)
