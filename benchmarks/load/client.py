"""Client: asks servers as many users do, and keeps what each of them saw."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from pdstore.router.bodies import REMOTE_DECODE, Json, prefill_body

Mode = Literal["alone", "relayed", "concurrent"]

_ANSWER_S = 300.0


class AskError(Exception):
    """Raised where a server refuses a request or breaks its answer off."""


@dataclass
class Answer:
    """One answer, as its user saw it. Times are seconds since the load began.

    turn: 0 for a user's first question.
    prefill_s: what P took for its part; 0 without a P.
    gaps: seconds between the tokens.
    """

    turn: int
    num_tokens: int
    sent: float
    prefill_s: float = 0.0
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Client:
    """Asks one instance, or P and D.

    urls: of the instance; or of P, then of D.
    """

    def __init__(self, http: httpx.AsyncClient, urls: list[str], mode: Mode) -> None:
        self._http, self._urls, self._mode = http, urls, mode
        self._began = time.monotonic()
        self.gate = asyncio.Event()  # questions wait until it is set
        self.num_held = 0
        self.answers: list[Answer] = []
        self.begun: list[Answer] = []  # also those that have not ended
        self.errors: list[str] = []
        self.num_asked = 0

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    @property
    def num_open(self) -> int:
        """The number of questions that a server has and has not answered."""
        return self.num_asked - self.num_held - len(self.answers) - len(self.errors)

    async def ask(self, prompt: list[int], max_tokens: int, turn: int = 0) -> list[int]:
        """Streams an answer and returns its token ids; none where it failed."""
        self.num_asked += 1
        self.num_held += 1
        await self.gate.wait()
        self.num_held -= 1
        answer = Answer(turn, len(prompt), self.now)
        self.begun.append(answer)
        body: Json = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            if self._mode == "alone":
                await self._stream(self._urls[0], body, answer)
            else:
                await self._ask_pair(body, answer)
        except (AskError, httpx.HTTPError) as error:
            self.errors.append(repr(error)[:300])
            return []
        self.answers.append(answer)
        return answer.ids

    async def _ask_pair(self, body: Json, answer: Answer) -> None:
        p, d = self._urls
        if self._mode == "relayed":
            params = await self._prefill(p, body, REMOTE_DECODE, answer)
            await self._stream(d, body | {"kv_transfer_params": params}, answer)
            return
        named: Json = {"pdstore": {"attempt": secrets.token_hex(16)}}
        prefill = asyncio.create_task(self._prefill(p, body, REMOTE_DECODE | named, answer))
        try:
            await self._stream(d, body | {"kv_transfer_params": named}, answer)
            await prefill
        finally:
            prefill.cancel()

    async def _prefill(self, url: str, body: Json, params: Json, answer: Answer) -> Json | None:
        began = time.monotonic()
        asked = prefill_body(body, params)
        response = await self._http.post(f"{url}/v1/completions", json=asked, timeout=_ANSWER_S)
        if response.status_code != 200:
            raise AskError(f"P: {response.status_code} {response.text[:200]}")
        answer.prefill_s = time.monotonic() - began
        params_of_p: Json | None = response.json().get("kv_transfer_params")
        return params_of_p

    async def _stream(self, url: str, body: Json, answer: Answer) -> None:
        request = self._http.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=_ANSWER_S
        )
        async with request as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise AskError(f"{response.status_code} {text[:200]}")
            async for event in _events(response):
                if "error" in event:
                    raise AskError(str(event["error"])[:200])
                ids = event["choices"][0].get("token_ids") if event["choices"] else None
                answer.times += [self.now] * len(ids or ())
                answer.ids += ids or ()
        if not answer.ids:
            raise AskError("an answer without tokens")


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    rest = b""
    async for part in response.aiter_raw():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
