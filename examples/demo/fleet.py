"""The instances of the demo and the two runs: P and D with the pool, and without it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from examples.demo.client import Answer, ask, counters, is_healthy
from examples.demo.processes import DemoError, Process, Processes, free_ports
from examples.demo.prompts import Prompt
from examples.demo.report import Row, Run
from examples.demo.status import say, show

SWITCH = "PD_TRANSFER_VIA_STORAGE"
MAX_TOKENS = 16

_READY_S = 120.0
_STAGING = "64MiB"


def _mini(model: Path, role: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "examples.mini_engine", "--model", str(model)]
    return [*command, "--role", role, "--port", str(port), "--served-model-name", "demo"]


ENGINES: dict[str, Callable[[Path, str, int], list[str]]] = {"mini": _mini}
"""Engines by name: the command of an instance, of its model, role and port."""


class Fleet:
    """One instance that works alone, P and D, and the router in front of these two."""

    def __init__(self, processes: Processes, engine: str, model: Path, pool: str) -> None:
        self._processes, self._model, self._pool = processes, model, pool
        self._command = ENGINES[engine]
        names = ("alone", "prefill", "decode", "router")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))

    def run(self, prompts: Sequence[Prompt]) -> tuple[Run, Run]:
        """Every prompt through P and D with the switch on, and then with it off."""
        begin = time.monotonic()
        pair = [self._start("prefill", is_on=True), self._start("decode", is_on=True)]
        self._start("alone", is_on=False)
        self._start_router()
        self._wait_ready(begin, "alone, P, D and the router")
        alone = self._ask_all("alone", prompts)
        on = self._measure(prompts, alone)
        self._processes.stop(*pair)
        begin = time.monotonic()
        for name in ("prefill", "decode"):
            self._start(name, is_on=False)
        self._wait_ready(begin, "P and D, switched off,")
        return on, self._measure(prompts, alone)

    def _measure(self, prompts: Sequence[Prompt], alone: Sequence[Answer]) -> Run:
        answers = self._ask_all("router", prompts)
        p, d = counters(self._url("prefill")), counters(self._url("decode"))
        return Run(
            rows=[Row.of(*pair) for pair in zip(answers, alone, strict=True)],
            used=sum(both[name] for both in (p, d) for name in both if name.startswith("pdstore_")),
            saved=p.get("pdstore_tokens_total:saved", 0),
            loaded=d.get("pdstore_tokens_total:loaded", 0),
            fed=d["mini_engine_computed_tokens_total"],
            answered=sum(len(answer.token_ids) for answer in answers),
        )

    def _ask_all(self, name: str, prompts: Sequence[Prompt]) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(prompts, 1):
            show(f"asking {name}: prompt {number} of {len(prompts)}")
            try:
                answers.append(ask(self._url(name), prompt, MAX_TOKENS))
            except DemoError as error:
                self._processes.check()
                tails = self._processes.tails(name, "prefill", "decode")
                raise DemoError(f"prompt {number}: {error}\n{tails}") from error
        return answers

    def _start(self, name: str, *, is_on: bool) -> Process:
        """An engine; nothing but its environment says whether it hands over through the pool."""
        role = "both" if name == "alone" else name
        env = {"PDSTORE_STAGING": _STAGING, **os.environ, "PDSTORE_STORE": self._pool}
        env.pop("PDSTORE_ROLE", None)
        env.pop(SWITCH, None)
        if is_on:
            env[SWITCH] = "1"
        command = self._command(self._model, role, self._ports[name])
        is_ready = partial(is_healthy, self._url(name))
        log = name if is_on or name == "alone" else f"{name}-off"
        return self._processes.start(name, command, is_ready, env, log)

    def _start_router(self) -> None:
        command = [sys.executable, "-m", "examples.router", "--port", str(self._ports["router"])]
        for name in ("prefill", "decode"):
            command += [f"--{name}", self._url(name)]
        self._processes.start("router", command, partial(is_healthy, self._url("router")))

    def _wait_ready(self, begin: float, who: str) -> None:
        self._processes.wait_ready(_READY_S, show)
        say(f"started     {who} in {time.monotonic() - begin:.1f} s")

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"
