"""FirstToken: P's token as the first of the client's answer, and D's answer as what follows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from typing_extensions import Self

from pdstore.router.answers import WholeAnswer
from pdstore.router.bodies import Json, parse
from pdstore.router.intake import Asked

Part: TypeAlias = dict[str, Any]

_HALF_CHARACTER = "\ufffd"

_CONTINUED = {
    *("model", "max_tokens", "min_tokens", "stream", "ignore_eos", "user", "priority"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids"),
    *("logprobs", "return_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    *("cache_salt", "request_id", "add_special_tokens", "kv_transfer_params"),
}
"""Fields of which each token is chosen by itself, or from all before it."""
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stop": ([], ""),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
}
"""Other fields, and the values with which they change nothing."""


def changes_nothing(body: Json, known: Iterable[str] = ()) -> bool:
    """True if P's token and D's continuation of it are what one instance would answer.

    False where the first token affects later ones in another way than as a part of the prompt
    (`stop`, penalties, `seed`, structured answers), where there are several answers, and for a
    field that is neither in a list here nor in `known`, since it may do anything. False also for a
    limit of tokens like 3.0: vLLM takes it, but the router counts only in whole numbers.
    """
    if not all(isinstance(body.get(name) or 0, int) for name in _LIMITS):
        return False
    return all(
        value is None or name in _CONTINUED or name in known or value in _NEUTRAL.get(name, ())
        for name, value in body.items()
    )


def first_body(body: Json) -> Json:
    """Returns the client's body, changed so that P's answer has all that `FirstToken` needs."""
    return body | {"return_token_ids": True}


@dataclass(frozen=True)
class FirstToken:
    """The first token of a completion, as P gave it.

    body: the client's.
    answer: P's, to the same prompt with one token to answer; one choice.
    prompt: the prompt's token ids.
    """

    body: Json
    answer: Part
    prompt: list[int]

    default_max_tokens: ClassVar[int | None] = 16
    """OpenAI's default for completions."""

    @staticmethod
    def can_continue(body: Json) -> bool:
        """True if the answer to this request may begin with P's token."""
        return _is_one_prompt(body.get("prompt")) and changes_nothing(body, ("prompt",))

    @classmethod
    def found_in(cls, body: Json, answer: Json | None) -> Self | None:
        """Returns the first token; None if D has to give it, since P's answer is not enough.

        A token that is half a character or has no text can only be shown with those after it.
        """
        match answer:
            case {"choices": [{"token_ids": [int()], "prompt_token_ids": [*prompt], "text": text}]}:
                return cls(body, dict(answer or {}), prompt).if_told(text)
        return None

    def if_told(self, text: str) -> Self | None:
        """Returns this token if its text stands by itself or ends the answer, else None."""
        is_told = bool(text) and _HALF_CHARACTER not in text
        return self if is_told or self.is_last else None

    @property
    def is_last(self) -> bool:
        """True if the answer ends with it."""
        return self._choice["finish_reason"] != "length" or self._max_tokens == 1

    def rest_of(self, asked: Asked) -> Asked:
        """Returns the request for the rest of the answer: its prompt is a token longer."""
        return replace(asked, body=self._body_of_rest() | {"prompt": self._prompt_of_rest})

    def is_continued_by(self, answer: Part) -> bool:
        """True if D's answer, or the first part of its stream, goes on behind this token."""
        return True

    def parts(self) -> list[Part]:
        """Returns the parts of a stream with this token: what comes before D's, or all if last."""
        head = self._head()
        end = self._choice["finish_reason"] if self.is_last else None
        choice = self._as_part(self._asked_for(self._choice | {"finish_reason": end}))
        parts = [head | {"choices": [choice]}]
        options = self.body.get("stream_options")
        if self.is_last and isinstance(options, dict) and options.get("include_usage"):
            parts.append(head | {"choices": [], "usage": self.answer["usage"]})
        return parts

    def whole(self) -> Part:
        """Returns the answer that consists of this token."""
        answer = {name: self.answer[name] for name in self.answer if name != "kv_transfer_params"}
        return self._asked_for(answer) | {"choices": [self._asked_for(self._choice)]}

    def next_part(self, part: Part) -> Part:
        """Returns a part of D's stream, changed so that it continues this token."""
        choices = [self._behind(choice, None) for choice in part.get("choices") or ()]
        return self._counted(part) | {"choices": choices}

    def with_rest(self, rest: Part) -> Part:
        """Returns the answer that consists of this token and D's answer to `rest_of`."""
        choice = self._with_text(self._behind(rest["choices"][0], self.prompt))
        if choice.get("token_ids") is not None:
            choice["token_ids"] = self._choice["token_ids"] + choice["token_ids"]
        ours = self._choice.get("logprobs")
        theirs = choice.get("logprobs")
        if ours and theirs:
            choice["logprobs"] = {
                name: ours[name] + value if isinstance(value, list) else value
                for name, value in theirs.items()
            }
        return self._counted(rest) | {"choices": [choice]}

    def _body_of_rest(self) -> Json:
        rest = {name: self.body[name] for name in self.body if name != "max_completion_tokens"}
        if self._max_tokens is not None:
            rest["max_tokens"] = self._max_tokens - 1
        min_tokens = self.body.get("min_tokens")
        if isinstance(min_tokens, int) and min_tokens > 0:
            rest["min_tokens"] = min_tokens - 1
        return rest

    def _head(self) -> Part:
        """Returns the fields of P's answer that every part of a stream repeats."""
        return {name: self.answer[name] for name in self.answer if name not in _OF_THE_WHOLE}

    def _as_part(self, choice: Part) -> Part:
        """Returns P's choice in the form that it has in a stream."""
        return choice

    def _with_text(self, choice: Part) -> Part:
        """Returns D's choice with this token's text before its own."""
        return choice | {"text": self._choice["text"] + choice["text"]}

    @property
    def _choice(self) -> Part:
        choice: Part = self.answer["choices"][0]
        return choice

    @property
    def _prompt_of_rest(self) -> list[int]:
        return [*self.prompt, *self._choice["token_ids"]]

    @property
    def _max_tokens(self) -> int | None:
        given = self.body.get("max_completion_tokens")
        if given is None:
            given = self.body.get("max_tokens", self.default_max_tokens)
        return given if isinstance(given, int) else None

    def _asked_for(self, answer: Part) -> Part:
        """Returns an answer or a choice without what only the router asked for."""
        if self.body.get("return_token_ids"):
            return answer
        return {name: value for name, value in answer.items() if name not in _IDS}

    def _behind(self, choice: Part, prompt: list[int] | None) -> Part:
        """Returns D's choice with its offsets, and with the ids of the client's own prompt."""
        choice = dict(choice)
        if choice.get("prompt_token_ids") is not None:
            choice["prompt_token_ids"] = prompt
        logprobs = choice.get("logprobs")
        if logprobs and logprobs.get("text_offset"):
            shift = len(self._choice["text"])
            offsets = [offset + shift for offset in logprobs["text_offset"]]
            choice["logprobs"] = logprobs | {"text_offset": offsets}
        return choice

    def _counted(self, answer: Part) -> Part:
        """Returns D's answer under P's id; its usage counts this token as part of the answer."""
        named: Part = {name: self.answer[name] for name in ("id", "created") if name in self.answer}
        usage = answer.get("usage")
        if usage:
            named["usage"] = usage | {
                "prompt_tokens": usage["prompt_tokens"] - 1,
                "completion_tokens": usage["completion_tokens"] + 1,
            }
        return answer | named


_IDS = ("token_ids", "prompt_token_ids")
_OF_THE_WHOLE = ("usage", "kv_transfer_params", "choices")


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(i, int) for i in prompt)


_TEMPLATED = {
    *("messages", "max_completion_tokens", "top_logprobs", "chat_template", "documents"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}
"""Fields of a chat that only change its prompt, or each token by itself."""
_OF_A_MESSAGE = ("role", "content")
_IDS_OF_A_QUESTION = [1, 0, 1, 0]
"""Ids that every vocabulary has. No chat template makes just these of a message."""


@dataclass(frozen=True)
class FirstChatToken(FirstToken):
    """The first token of a chat's answer, as P gave it.

    D gets the messages and, in `kv_transfer_params`, the ids of the prompt and of this token: an
    engine that takes them makes no prompt of the messages.
    """

    default_max_tokens: ClassVar[int | None] = None

    @staticmethod
    def can_continue(body: Json) -> bool:
        """True if the answer may begin with P's token: messages of text, and no tools."""
        return _are_text(body.get("messages")) and changes_nothing(body, _TEMPLATED)

    @classmethod
    def found_in(cls, body: Json, answer: Json | None) -> Self | None:
        """Returns the first token; None if D has to give it.

        Only D can tell a token that P's parser took for thinking or for a tool's call.
        """
        given: Part = dict(answer or {})
        match given:
            case {
                "prompt_token_ids": [*prompt],
                "choices": [{"token_ids": [int()], "message": {"content": str(text), **others}}],
            } if not any(others[name] for name in others if name != "role"):
                return cls(body, given, prompt).if_told(text)
        return None

    @staticmethod
    def question(asked: Asked) -> Asked:
        """Returns a short chat, whose answer tells whether D takes ids instead of messages."""
        body: Json = {
            **{name: asked.body[name] for name in ("model",) if name in asked.body},
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        return replace(asked, body=body, prompt_ids=_IDS_OF_A_QUESTION)

    @staticmethod
    def are_ids_taken(answer: WholeAnswer | None) -> bool | None:
        """Returns what D's answer to the question tells; None if it is none or tells nothing."""
        if answer is None or not answer.is_success:
            return None
        try:
            return parse(answer.content).get("prompt_token_ids") == _IDS_OF_A_QUESTION
        except ValueError:
            return None

    def rest_of(self, asked: Asked) -> Asked:
        """Returns the request for the rest of the answer, in ids; D's answer says which it took."""
        body = self._body_of_rest() | {"return_token_ids": True}
        return replace(asked, body=body, prompt_ids=self._prompt_of_rest)

    def rest_in_words(self, asked: Asked) -> Asked:
        """Returns the request for the rest of the answer, for a D that takes no token ids.

        The last message is this token's text, which D is to continue. Whether D's tokens are those
        of the prompt and this token, its answer tells.
        """
        messages = self.body["messages"]
        assert isinstance(messages, list)
        text = self._choice["message"]["content"]
        last = messages[-1].get("content")
        if self.body.get("continue_final_message") and isinstance(last, str):
            messages, text = messages[:-1], last + text
        body = self._body_of_rest() | {
            "messages": [*messages, {"role": "assistant", "content": text}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "return_token_ids": True,
        }
        return replace(asked, body=body)

    def is_continued_by(self, answer: Part) -> bool:
        """True if D's answer, or the first part of its stream, goes on behind this token.

        D's answer to the messages begins with its own first token: the client's second.
        """
        return bool(answer.get("prompt_token_ids") == self._prompt_of_rest)

    def _head(self) -> Part:
        return self._asked_for(super()._head()) | {"object": "chat.completion.chunk"}

    def _as_part(self, choice: Part) -> Part:
        part = {name: choice[name] for name in choice if name != "message"}
        message = choice["message"]
        return part | {"delta": {name: message[name] for name in _OF_A_MESSAGE}}

    def _with_text(self, choice: Part) -> Part:
        message = choice["message"]
        text = self._choice["message"]["content"] + (message.get("content") or "")
        return choice | {"message": message | {"content": text}}

    def _behind(self, choice: Part, prompt: list[int] | None) -> Part:
        choice = self._asked_for(choice)
        if "delta" not in choice:
            return choice
        delta = {name: value for name, value in choice["delta"].items() if name != "role"}
        return choice | {"delta": delta}

    def _counted(self, answer: Part) -> Part:
        """Returns D's answer under P's id, with the client's own prompt."""
        ids = answer.get("prompt_token_ids")
        counted = super()._counted(answer)
        if ids is not None:
            is_whole = "delta" not in answer["choices"][0]
            counted["prompt_token_ids"] = self.prompt if is_whole else None
        return self._asked_for(counted)


def _are_text(messages: object) -> bool:
    """True if no message holds an image, a sound or the like: D would need more than token ids."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return len(contents) == len(messages) and all(map(_is_text, contents))


def _is_text(content: object) -> bool:
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
