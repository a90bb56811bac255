"""Fleet: the instances of the demo, and its runs with the pool and without it."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.demo.client import Answer, ask, counters, is_healthy
from examples.demo.conversation import ANSWER_TOKENS, Conversation
from examples.demo.engines import Counters, Engine
from examples.demo.processes import DemoError, Process, Processes
from examples.demo.prompts import Prompt, first_turn, question, whole_blocks
from examples.demo.report import Run, Runs
from examples.demo.row import Row
from examples.demo.status import say, show
from examples.ports import free_ports

SWITCH = "PD_TRANSFER_VIA_STORAGE"
MAX_TOKENS = 16
WARM_UP = "Once upon a time"

_STAGING = "64MiB"
_SAVED_S, _POLL_S = 5.0, 0.05


class Fleet:
    """One instance that works alone; P and D; a router and a proxy in front of P and D.

    A second router takes the one that works alone for P: the switch is off there.
    """

    def __init__(self, processes: Processes, engine: Engine, model: Path, pool: str) -> None:
        self._processes, self._engine, self._model, self._pool = processes, engine, model, pool
        self._weights = f"demo-{secrets.token_hex(8)}"  # what earlier runs left is not found
        names = ("alone", "prefill", "decode", "router", "proxy", "router-off")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))

    def run(self, prompts: Sequence[Prompt]) -> Runs:
        """Sends every prompt through P and D: twice with the switch on, then with it off."""
        begin = time.monotonic()
        pair = [self._start("prefill", is_on=True), self._start("decode", is_on=True)]
        self._start("alone", is_on=False)
        self._start_front("router", "pdstore.router")
        self._start_front("proxy", "examples.plain_proxy")
        self._start_front("router-off", "pdstore.router", p="alone")
        who = "alone, P, D, two routers and the proxy"
        self._wait_ready(begin, who, "alone", "prefill", "decode")
        alone = self._ask_all("alone", prompts)
        on, plain = (self._measure(front, prompts, alone) for front in ("router", "proxy"))
        turns = self._converse(first_turn(self._model))
        self._processes.stop(*pair)
        begin = time.monotonic()
        self._start("decode", is_on=False)
        self._wait_ready(begin, "D, switched off,", "decode")
        return Runs(on, plain, self._measure("router-off", prompts, alone, p="alone"), turns)

    def _converse(self, prompt: list[int]) -> Conversation:
        """Asks two turns; what D decoded in the first is in the pool before the second."""
        before = self._count("decode")
        answer, alone = self._ask_both("turn 1", prompt, ANSWER_TOKENS)
        known = prompt + answer.token_ids
        expected = whole_blocks(len(known) - 1) - whole_blocks(len(prompt))
        deadline = time.monotonic() + _SAVED_S
        while self._saved_by_d(before) < expected and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        p_before = self._count("prefill")
        again, again_alone = self._ask_both("turn 2", known + question(self._model), MAX_TOKENS)
        p = _since(p_before, self._count("prefill"))
        rows = [Row.of(answer, alone), Row.of(again, again_alone)]
        return Conversation(rows, len(known), int(p.get("pdstore_tokens_total:loaded", 0)))

    def _saved_by_d(self, before: Counters) -> float:
        return _since(before, self._count("decode")).get("pdstore_tokens_total:saved", 0)

    def _measure(
        self, front: str, prompts: Sequence[Prompt], alone: Sequence[Answer], p: str = "prefill"
    ) -> Run:
        p_before, d_before = self._count(p), self._count("decode")
        answers = self._ask_all(front, prompts)
        of_p = _since(p_before, self._count(p))
        of_d = _since(d_before, self._count("decode"))
        return Run(
            rows=[Row.of(*pair) for pair in zip(answers, alone, strict=True)],
            used=sum(
                each[name] for each in (of_p, of_d) for name in each if name.startswith("pdstore_")
            ),
            saved=of_p.get("pdstore_tokens_total:saved", 0),
            loaded=of_d.get("pdstore_tokens_total:loaded", 0),
            computed=self._engine.computed(of_d, answers),
        )

    def _ask_all(self, name: str, prompts: Sequence[Prompt]) -> list[Answer]:
        return [
            self._ask(name, f"prompt {number} of {len(prompts)}", prompt, MAX_TOKENS)
            for number, prompt in enumerate(prompts, 1)
        ]

    def _ask_both(self, what: str, prompt: Prompt, max_tokens: int) -> tuple[Answer, Answer]:
        """Asks P and D behind the router, and the instance that works alone."""
        through = self._ask("router", what, prompt, max_tokens)
        return through, self._ask("alone", what, prompt, max_tokens)

    def _ask(self, name: str, what: str, prompt: Prompt, max_tokens: int) -> Answer:
        show(f"asking {name}: {what}")
        try:
            before = self._count("decode")
            answer = ask(self._url(name), prompt, max_tokens)
            self._engine.explain(answer, _since(before, self._count("decode")))
        except DemoError as error:
            self._processes.check()
            tails = self._processes.tails(name, "prefill", "decode")
            raise DemoError(f"{what}: {error}\n{tails}") from error
        return answer

    def _count(self, name: str) -> Counters:
        return counters(self._url(name))

    def _start(self, name: str, *, is_on: bool) -> Process:
        """Starts an engine; only its environment decides whether it uses the pool."""
        role = "both" if name == "alone" else name
        defaults = {"PDSTORE_STAGING": _STAGING, "PDSTORE_WEIGHTS": self._weights}
        env = {**defaults, **os.environ, "PDSTORE_STORE": self._pool}
        env.pop("PDSTORE_ROLE", None)
        env.pop(SWITCH, None)
        if is_on:
            env[SWITCH] = "1"
        command = self._engine.command(self._model, role, self._ports[name])
        is_ready = partial(is_healthy, self._url(name))
        log = name if is_on or name == "alone" else f"{name}-off"
        return self._processes.start(name, command, is_ready, env, log)

    def _start_front(self, name: str, module: str, p: str = "prefill") -> None:
        command = [sys.executable, "-m", module, "--port", str(self._ports[name])]
        command += ["--prefill", self._url(p), "--decode", self._url("decode")]
        self._processes.start(name, command, partial(is_healthy, self._url(name)))

    def _wait_ready(self, begin: float, who: str, *names: str) -> None:
        self._processes.wait_ready(self._engine.ready_s, show)
        for name in names:
            ask(self._url(name), WARM_UP, MAX_TOKENS)  # an engine's first answer takes longer
        say(f"started     {who} in {time.monotonic() - begin:.1f} s")

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"


def _since(before: Counters, now: Counters) -> Counters:
    return {name: now[name] - before.get(name, 0.0) for name in now}
