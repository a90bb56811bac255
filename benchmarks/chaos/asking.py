"""Asks instances over HTTP as any client does, and compares their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

from benchmarks.chaos.engines import MINI, Engine
from benchmarks.chaos.prompts import MAX_TOKENS


class Answer(NamedTuple):
    """A whole answer. num_loaded: prompt tokens that the instance took from the pool."""

    ids: list[int]
    logprobs: list[float]
    num_loaded: int

    def is_like(self, other: Answer, tolerance: float = Engine.tolerance) -> bool:
        """True if both have the same tokens with the same probabilities."""
        if self.ids != other.ids or len(self.logprobs) != len(other.logprobs):
            return False
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return all(math.isclose(a, b, abs_tol=tolerance) for a, b in pairs)


class NoAnswerError(Exception):
    """Raised for an answer that is an error, or that broke off."""


async def ask(
    client: httpx.AsyncClient,
    url: str,
    prompt: Sequence[int],
    engine: Engine = MINI,
    *,
    streams: bool = False,
) -> Answer:
    """Returns an instance's answer. Raises NoAnswerError, and httpx.TimeoutException."""
    body = {
        **{"prompt": list(prompt), "max_tokens": MAX_TOKENS, "ignore_eos": True},
        **{"logprobs": 1, "return_token_ids": True, "stream": streams, "temperature": 0},
        **({"stream_options": {"include_usage": True}} if streams else {}),
    }
    try:
        response = await client.post(url + "/v1/completions", json=body)
    except httpx.TimeoutException:
        raise
    except httpx.TransportError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise NoAnswerError(f"HTTP {response.status_code}: {response.text[:200]}")
    return _answer_of(_events(response.text) if streams else [response.json()], engine)


def _events(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line)
    try:
        return [json.loads(line) for line in lines if line != "[DONE]"]
    except ValueError as error:
        raise NoAnswerError("the stream broke off") from error


def _answer_of(parts: Sequence[dict[str, Any]], engine: Engine) -> Answer:
    ids: list[int] = []
    logprobs: list[float] = []
    num_loaded = -1
    for part in parts:
        if "error" in part:
            raise NoAnswerError(str(part["error"]))
        for choice in part["choices"]:
            ids += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
        if part.get("usage"):
            num_loaded = engine.num_loaded(part["usage"])
    if num_loaded < 0:
        raise NoAnswerError("the answer has no end")
    return Answer(ids, logprobs, num_loaded)
