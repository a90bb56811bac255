"""One SGLang server in a process of its own, asked over HTTP by token ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WATCHED = range(10, 74)
"""Tokens whose logprobs are compared: they are there too where two answers part at once."""


@dataclass
class Answer:
    """Tokens of an answer, and when they came; times are those of `time.monotonic`.

    num_cached: tokens of the prompt that were not computed, from any tier.
    logprobs: of each token of `ids`; empty where they were not asked for.
    watched: logprobs of the `WATCHED` tokens in the place of the first token; likewise.
    """

    asked_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Seconds of a decode step; 0 for an answer of one token."""
        return (self.ended_at - self.first_at) / max(1, len(self.ids) - 1)


class Instance:
    """One server. `start` it, `wait_ready`, `ask`, `stop`.

    launch: the arguments of Python that start a server, before its options.
    """

    def __init__(
        self,
        name: str,
        port: int,
        launch: Sequence[str],
        options: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
    ) -> None:
        self.name, self._url = name, f"http://127.0.0.1:{port}"
        self._command = [sys.executable, *launch, "--port", str(port), *options]
        self._environment = {**os.environ, **environment}
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self) -> None:
        self._started_at = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes end with it
            )

    def wait_ready(self, timeout_s: float) -> float:
        """Returns the seconds since its start. Raises RuntimeError with the log's end if it fails.

        timeout_s: from its start.
        """
        while time.monotonic() - self._started_at < timeout_s:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if self._answers("/health"):
                return time.monotonic() - self._started_at
            time.sleep(0.5)
        lines = self._log.read_text(errors="replace").splitlines()[-30:]
        tail = "\n".join(line[:200] for line in lines)
        raise RuntimeError(f"{self.name} does not start:\n{tail}")

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        logprobs: bool = False,
        timeout_s: float = 90,
    ) -> Answer:
        """Asks for exactly so many tokens, greedily. Raises OSError."""
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
            "stream": True,
            "return_logprob": logprobs,
        }
        if logprobs:
            body["token_ids_logprob"] = list(WATCHED)
        content = json.dumps(body).encode()
        answer = Answer(time.monotonic())
        with self._request("/generate", content, timeout_s) as lines:
            for event in _events(lines):
                answer.ended_at = time.monotonic()
                answer.first_at = answer.first_at or answer.ended_at
                _take(answer, event)
        return answer

    def forget(self) -> None:
        """Empties the caches on the GPU and in host memory; the pool keeps what it has."""
        end = time.monotonic() + 5
        while not self._answers("/flush_cache", b"") and time.monotonic() < end:
            time.sleep(0.25)  # a backup still runs

    def kill(self) -> None:
        """Tells all its processes to end; `stop` waits for them."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self, *, kill: bool = False) -> None:
        """Ends all its processes; twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):  # what it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)

    def _answers(self, path: str, content: bytes | None = None) -> bool:
        """True if the server answers that all is well."""
        try:
            self._request(path, content, timeout_s=10).close()
        except OSError:
            return False
        return True

    def _request(self, path: str, content: bytes | None = None, timeout_s: float = 10) -> Any:
        request = urllib.request.Request(self._url + path, content)
        request.add_header("content-type", "application/json")
        return urllib.request.urlopen(request, timeout=timeout_s)


def stop_all(instances: Iterable[Instance]) -> None:
    """Ends servers at once: each takes seconds to give back its host pool."""
    instances = list(instances)
    for each in instances:
        each.kill()
    for each in instances:
        each.stop(kill=True)


def distance(one: Answer, other: Answer) -> dict[str, float | None]:
    """Returns the largest differences of a logprob.

    watched: of the watched tokens, in the place of the first token.
    answer: of the answers' tokens, up to where these part; None if the first ones differ.
    """
    alike = 0
    while alike < min(len(one.ids), len(other.ids)) and one.ids[alike] == other.ids[alike]:
        alike += 1
    pairs = zip(one.logprobs[:alike], other.logprobs[:alike], strict=False)
    return {
        "watched": _largest(zip(one.watched, other.watched, strict=True)),
        "answer": _largest(pairs),
    }


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        text = line.decode().strip().removeprefix("data:").strip()
        if text.startswith("{"):
            event: dict[str, Any] = json.loads(text)
            if "error" in event:
                raise OSError(f"refused: {event['error']}")
            yield event


def _take(answer: Answer, event: dict[str, Any]) -> None:
    """Takes a chunk, which repeats all tokens so far."""
    about = event["meta_info"]
    answer.ids = list(event["output_ids"])
    answer.num_cached = about.get("cached_tokens", 0)
    answer.logprobs = [each[0] for each in about.get("output_token_logprobs", ())]
    if not answer.watched:
        first = next(iter(about.get("output_token_ids_logprobs", ())), ())
        answer.watched = [each[0] for each in first]


def _largest(pairs: Iterable[tuple[float, float]]) -> float | None:
    return max((abs(a - b) for a, b in pairs), default=None)
