"""Asks a server for completions, and reads its counters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from adapters_vllm.servers import Server

ANSWER_S = 60.0
MOST_DIFFERENCE = 1e-4  # one wrong token in a V page is 0.05, and leaves the ids as they are
_ENGINES_LABELS = ("engine", "model_name")

_random = random.Random(7)
_salts = itertools.count()


@dataclass(frozen=True)
class Answer:
    """A completion: its tokens, their logprobs, and what the server says of the prompt's KV."""

    ids: list[int]
    logprobs: list[float]
    num_cached: int
    params: dict[str, Any] | None
    body: dict[str, Any]

    def assert_same(self, other: Answer) -> None:
        """The same tokens with the same logprobs."""
        assert self.ids == other.ids
        differences = [abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)]
        assert max(differences) <= MOST_DIFFERENCE, differences


def new_prompt(num_tokens: int) -> list[int]:
    """A prompt that nobody has seen: no test can meet another one's blocks."""
    return [_random.randrange(256) for _ in range(num_tokens)]


def post(server: Server, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        **more,
    }
    url = server.url + "/v1/completions"
    return httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)


def ask(server: Server, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Answer:
    """A completion; `more` goes into the request's body."""
    response = post(server, prompt, max_tokens, **more)
    assert response.status_code == 200, response.text
    body = response.json()
    [choice], usage = body["choices"], body["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        details.get("cached_tokens") or 0,
        body.get("kv_transfer_params"),
        body,
    )


def alone(server: Server, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Answer:
    """What a server answers by itself: with a salt nothing comes from the pool or any cache."""
    return ask(server, prompt, max_tokens, cache_salt=f"salt {next(_salts)}", **more)


def prefill(server: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """P's half: what its answer has for D."""
    params = ask(server, prompt, 1, kv_transfer_params={"do_remote_decode": True}).params
    assert params is not None
    return params


def at_once(calls: Sequence[Any], workers: int = 4) -> list[Any]:
    """Results of functions that are called by several threads."""
    with ThreadPoolExecutor(workers) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def counted(server: Server) -> dict[str, float]:
    """Counters and gauges by name and labels, like `pdstore_tokens_total:loaded`."""
    response = httpx.get(server.url + "/metrics", timeout=ANSWER_S, trust_env=False)
    return {
        _name_of(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if family.type in ("counter", "gauge", "histogram") and not sample.name.endswith("_bucket")
    }


def _name_of(name: str, labels: dict[str, str]) -> str:
    return ":".join([name, *(v for k, v in labels.items() if k not in _ENGINES_LABELS)])


class Since:
    """What a server has counted since this was made."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, counted(server)

    def __getitem__(self, name: str) -> float:
        return self.all().get(name, 0.0)

    def all(self) -> dict[str, float]:
        """Everything that has changed."""
        now = counted(self._server)
        changes = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        return {name: value for name, value in changes.items() if value}

    @property
    def computed(self) -> float:
        return self["vllm:prompt_tokens_by_source_total:local_compute"]

    @property
    def loaded(self) -> float:
        return self["pdstore_tokens_total:loaded"]
