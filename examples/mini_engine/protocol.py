"""Body and ChatBody: the fields of a request to /v1/completions and to /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

Zero = Annotated[float, Field(ge=0, le=0)]


class RefusedError(Exception):
    """Raised for a request that is answered with an error in OpenAI's form."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "internal_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class Options(BaseModel):
    """OpenAI's fields with vLLM's additions. Sampling options are refused: answers are greedy."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    temperature: Zero | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    n: Literal[1] | None = None
    stop: None = None
    logit_bias: None = None

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Returns the body in this JSON. Raises RefusedError with the first field that is wrong."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            where = problems[0]["loc"][:1]
            field = str(where[0]) if where else None
            said = "; or: ".join(p["msg"] for p in problems if p["loc"][:1] == where)
            message = f"{field or 'the body'}: {said}"
            if field == "temperature":
                message = "temperature must be 0 or left out: this engine's answers are greedy"
            raise RefusedError(message, param=field) from error


class Body(Options):
    """A request to complete a text or token ids."""

    prompt: str | list[int] = Field(min_length=1)
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens to tell with each; None for no logprobs at all."""
        return self.logprobs


class ChatBody(Options):
    """A request to answer a conversation. The chat template decides what messages may hold."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: None = None
    response_format: None = None

    @model_validator(mode="after")
    def _take_new_name(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens to tell with each; None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
