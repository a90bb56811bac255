"""Asks a server for completions, and reads its counters."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.adapters.vllm.servers import Server
from tests.support.file_pool import Losses
from tests.support.kv import eventually

ANSWER_S, IDLE_S = 60.0, 30.0
MAX_DIFFERENCE = 1e-4  # one wrong token in a V page is 0.05, and leaves the ids as they are
_LABEL = re.compile(r'(\w+)="([^"]*)"')
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
        assert max(differences) <= MAX_DIFFERENCE, differences


def new_prompt(num_tokens: int) -> list[int]:
    """A prompt that nobody has seen: no test can meet another one's blocks."""
    return [_random.randrange(256) for _ in range(num_tokens)]


class Client:
    """A request on its way, of a client that may go away."""

    def __init__(self, server: Server, prompt: Sequence[int], **more: Any) -> None:
        url = httpx.URL(server.url)
        body = json.dumps(_body(prompt, **more)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket = socket.create_connection((url.host, url.port))
        self._socket.sendall(head.encode() + body)

    def go_away(self) -> None:
        self._socket.close()


def post(
    server: Server,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    timeout_s: float = ANSWER_S,
    **more: Any,
) -> httpx.Response:
    body = _body(prompt, max_tokens, **more)
    url = server.url + "/v1/completions"
    return httpx.post(url, json=body, timeout=timeout_s, trust_env=False)


def _body(prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        **more,
    }


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
    """Returns what a server computes alone: with a salt nothing comes from the pool or a cache."""
    return ask(server, prompt, max_tokens, cache_salt=f"salt {next(_salts)}", **more)


def prefill(server: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """P's half: what its answer has for D."""
    params = ask(server, prompt, 1, kv_transfer_params={"do_remote_decode": True}).params
    assert params is not None
    return params


def forget(server: Server) -> None:
    """Empties a server's own prefix cache, and not the pool."""
    response = httpx.post(server.url + "/reset_prefix_cache", timeout=ANSWER_S, trust_env=False)
    assert response.json() == {"success": True}


def at_once(calls: Sequence[Any], workers: int = 4) -> list[Any]:
    """Results of functions that are called by several threads."""
    with ThreadPoolExecutor(workers) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def assert_blocks_are_back(server: Server) -> None:
    """Soon no request and no job holds KV blocks."""
    _assert_none(server, "vllm:kv_cache_usage_perc", "pdstore_jobs_alive")


def assert_idle(server: Server) -> None:
    """Soon nothing is held: no KV block, and no slot for a call that outlived its job."""
    _assert_none(server, "vllm:kv_cache_usage_perc", "pdstore_jobs_alive", "pdstore_slots_lent")


def _assert_none(server: Server, *names: str) -> None:
    def what_is_held() -> dict[str, float]:
        alone(server, [1], 1)  # gauges are of the last step
        now = counted(server)
        return {name: now[name] for name in names if now.get(name)}

    eventually(lambda: not what_is_held(), IDLE_S)


def counted(server: Server) -> dict[str, float]:
    """Counters and gauges by name and labels, like `pdstore_tokens_total:loaded`.

    By hand: the client library's own parser takes as long as an answer does.
    """
    text = httpx.get(server.url + "/metrics", timeout=ANSWER_S, trust_env=False).text
    counts = {}
    for line in text.splitlines():
        if line.startswith(("vllm:", "pdstore_")) and "_bucket{" not in line:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            kept = [v for k, v in _LABEL.findall(labels) if k not in _ENGINES_LABELS]
            counts[":".join([name, *kept])] = float(value)
    return counts


def num_spliced(router: Server) -> float:
    """How many answers of a router have begun with P's token."""
    text = httpx.get(router.url + "/metrics", trust_env=False).text
    found = re.search(r"^router_spliced_total (\S+)", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


class Since:
    """The growth of a server's counters since this was made."""

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


def answers_after_losses(
    p: Server, d: Server, losses: Losses, lengths: Iterable[int]
) -> Iterator[tuple[list[int], Answer]]:
    """Yields prompts of these lengths, and what D answers after the pool has lost P's values.

    Of a hand-off that lost none D computes one token.
    """
    for length in lengths:
        prompt = new_prompt(length)
        params = prefill(p, prompt)
        assert_idle(p)  # P has saved all
        num_lost, since = losses.lose(), Since(d)
        answer = ask(d, prompt, kv_transfer_params=params)
        assert num_lost or since.computed <= 1, length
        yield prompt, answer
