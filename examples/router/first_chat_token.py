"""FirstChatToken: a chat's answer made of P's first token and D's answer to the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Self

from examples.router.bodies import Json
from examples.router.first_token import FirstToken, Part, changes_nothing
from examples.router.intake import Asked
from examples.router.refusal import Refusal

_TEMPLATED = {
    *("messages", "max_completion_tokens", "top_logprobs", "chat_template", "documents"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}
"""Fields of a chat that only change its prompt, or each token by itself."""
_OF_A_MESSAGE = ("role", "content")
_NOT_OF_A_PROBE = ("stream_options", "min_tokens")


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
    def of(cls, body: Json, answer: Json | None) -> Self | None:
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

    def rest_of(self, asked: Asked) -> Asked:
        """Returns the request for the rest of the answer, in ids; D's answer says which it took."""
        body = self._body_of_rest() | {"return_token_ids": True}
        return replace(asked, body=body, prompt_ids=self._prompt_of_rest)

    def probe(self, asked: Asked) -> Asked:
        """Returns a short request, whose answer tells whether D takes ids."""
        rest = self.rest_of(asked)
        body = rest.body | {"stream": False, "max_tokens": 1}
        return replace(
            rest, body={name: body[name] for name in body if name not in _NOT_OF_A_PROBE}
        )

    def is_taken(self, answer: Part) -> bool:
        """True if this is D's answer to the ids, and not to the messages."""
        return bool(answer.get("prompt_token_ids") == self._prompt_of_rest)

    def _head(self) -> Part:
        return self._asked_for(super()._head()) | {"object": "chat.completion.chunk"}

    def _as_part(self, choice: Part) -> Part:
        part = {name: choice[name] for name in choice if name != "message"}
        message = choice["message"]
        return part | {"delta": {name: message[name] for name in _OF_A_MESSAGE}}

    def _with_text(self, choice: Part) -> Part:
        said = choice["message"]
        text = self._choice["message"]["content"] + (said.get("content") or "")
        return choice | {"message": said | {"content": text}}

    def _behind(self, choice: Part, prompt: list[int] | None) -> Part:
        choice = self._asked_for(choice)
        if "delta" not in choice:
            return choice
        delta = {name: value for name, value in choice["delta"].items() if name != "role"}
        return choice | {"delta": delta}

    def _counted(self, answer: Part) -> Part:
        """Returns D's answer under P's id, with the client's own prompt.

        Raises Refusal if D has answered the messages: its first token would be the client's second.
        """
        ids = answer.get("prompt_token_ids")
        if ids is not None and not self.is_taken(answer):
            raise Refusal.of(502, "D takes no token ids in chats, unlike a D that was asked before")
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
