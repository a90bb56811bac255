"""Instances whose chunks are logged and can be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.adapters.vllm.asking import Answer, alone, at_once, new_prompt
from tests.adapters.vllm.conftest import switched_on
from tests.adapters.vllm.servers import Launcher, Server
from tests.support.vllm_replay import LOG, REPLAY, ends_of

_MODULE = "tests.support.vllm_replay"
OPTIONS = (
    "--dtype=bfloat16",
    "--enable-prompt-tokens-details",
    f"--scheduler-cls={_MODULE}.ReplayScheduler",
)
CACHED = ("--enable-prefix-caching",)
# Else vLLM chooses by the CPU, and the states' size decides how long its blocks are.
DELTA_NET = (*CACHED, "--mamba-ssm-cache-dtype=float32")
FAMILIES = {"qwen3_next": DELTA_NET, "lfm2": CACHED, "granite": (), "nemotron_h": ()}
"""Each kind of model with states, with its options: vLLM caches no prefix of Mamba2 on a CPU."""
STATELESS = "--worker-cls=tests.support.vllm_stateless.StatelessWorker"


class Instances:
    """Instances over one pool, whose chunks are logged in one file: `chunks`."""

    def __init__(self, launcher: Launcher, model: Path, directory: Path, *options: str) -> None:
        self.chunks = directory / "chunks"
        self._launcher, self._model, self._options = launcher, model, options
        self._servers: list[Server] = []

    def start(self, name: str, store: str, role: str, *more: str, **env: str) -> Server:
        env = switched_on(store, role) | {LOG: str(self.chunks)} | env
        options = (*OPTIONS, *self._options, *more)
        server = self._launcher.vllm(f"{self._model.name}-{name}", self._model, *options, env=env)
        self._servers.append(server)
        return server

    def wait_ready(self) -> None:
        """Waits until all have answered once: some kernels compile at a first prompt."""
        at_once([server.wait_ready for server in self._servers])
        at_once([partial(alone, server, new_prompt(40)) for server in self._servers])

    def stop(self) -> None:
        at_once([server.stop for server in self._servers])

    def replayed(self, server: Server, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
        """What a server answers if it computes the prompt in the chunks of the last answer.

        Call it before anyone else computes a part of the prompt.
        """
        params = {REPLAY: ends_of(self.chunks, prompt)}
        return alone(server, prompt, max_tokens, kv_transfer_params=params)

    def assert_exact(self, answer: Answer, server: Server, prompt: Sequence[int]) -> Answer:
        """It is to the last bit what a server answers if it computes all chunks; returns that."""
        reference = self.replayed(server, prompt)
        assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs), len(prompt)
        return reference


@contextlib.contextmanager
def instances(
    launcher: Launcher, model: Path, directory: Path, *options: str
) -> Iterator[Instances]:
    """Instances that are stopped at the end."""
    made = Instances(launcher, model, directory, *options)
    try:
        yield made
    finally:
        made.stop()
