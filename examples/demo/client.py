"""Asks instances over HTTP, as any client would, and reads their counters."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from examples.demo.processes import DemoError
from examples.demo.prompts import Prompt

Json: TypeAlias = dict[str, Any]

_READ_S = 60.0
_PROBE_S = 1.0
_ENGINES_LABELS = ("engine", "model_name")  # vLLM's, on each of its counters


@dataclass
class Answer:
    """A streamed answer, and the tokens that D loaded and computed for it (`Engine.explain`)."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ttft_s: float = 0.0
    usage: Json = field(default_factory=dict)
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    reason: str | None = None


def is_healthy(url: str) -> bool:
    """True if the server answers that it is ready."""
    try:
        return httpx.get(url + "/health", timeout=_PROBE_S, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, prompt: Prompt, max_tokens: int) -> Answer:
    """Streams a completion. Raises DemoError if the answer is an error or breaks off."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, begin = Answer(), time.monotonic()
    try:
        with httpx.stream(
            "POST", url + "/v1/completions", json=body, timeout=_READ_S, trust_env=False
        ) as response:
            if response.status_code != 200:
                raise DemoError(f"{url}: HTTP {response.status_code}: {response.read().decode()}")
            for event in _events(response):
                _add(event, answer, begin)
    except httpx.TransportError as error:
        raise DemoError(f"{url}: the answer broke off: {error!r}") from error
    return answer


def counters(url: str) -> dict[str, float]:
    """Returns the counters of an instance by name and labels: `pdstore_tokens_total:loaded`.

    Labels that name the engine are left out, so that the names are those of every engine.
    """
    text = httpx.get(url + "/metrics", timeout=_READ_S, trust_env=False).text
    return {
        _name_of(sample): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "counter" and sample.name.endswith("_total")
    }


def _name_of(sample: Sample) -> str:
    labels = (value for name, value in sample.labels.items() if name not in _ENGINES_LABELS)
    return ":".join([sample.name, *labels])


def _events(response: httpx.Response) -> Iterator[Json]:
    """Yields the events of a stream. Only \\n ends a line: texts hold Unicode's other line ends."""
    rest = b""
    for part in itertools.chain(response.iter_bytes(), [b"\n"]):
        *lines, rest = (rest + part).split(b"\n")
        for line in (each.strip() for each in lines):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def _add(event: Json, answer: Answer, begin: float) -> None:
    if "error" in event:
        raise DemoError(f"the answer broke off: {event['error']['message']}")
    for choice in event["choices"]:
        if choice["token_ids"] and not answer.token_ids:
            answer.ttft_s = time.monotonic() - begin
        answer.text += choice["text"]
        answer.token_ids += choice["token_ids"]
        answer.logprobs += choice["logprobs"]["token_logprobs"]
    usage = event.get("usage")
    if usage:
        answer.usage, answer.prompt_tokens = usage, usage["prompt_tokens"]
