"""Measures a client's wait between P's answer and D's first token, in each kind of hand-off.

    exposed = D's first token - P's answer - one decode step

all by the client's clock; the decode step is the median gap between D's tokens.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.handoff.instance import Ask, Instance, Prompt
from benchmarks.handoff.recorder import now
from pdstore.router.bodies import REMOTE_DECODE

NUM_DECODED = 8
MODES = ("relayed", "concurrent", "settled", "computed")
"""relayed: D is asked with what P answered. concurrent: P and D are asked at once, with one id.
 settled: as relayed, after P has nothing left to do. computed: D computes all itself."""


@dataclass
class Sample:
    """One prompt, handed over once. Seconds; `exposed_s` of "computed" is D's whole prefill.

    saved_s: of "settled", from P's answer until its engine knows that all is stored, `done` too.
    """

    store: str
    mode: str
    tokens: int
    exposed_s: float
    ttft_s: float
    prefill_s: float
    d_computed: int
    reason: str | None
    saved_s: float | None = None


class Client:
    """Asks one P and one D, and an instance without a pool beside them."""

    def __init__(self, store: str, p: Instance, d: Instance, alone: Instance | None) -> None:
        self.store = store
        self._p, self._d, self._alone = p, d, alone
        self._num_asked = 0

    def hand_over(self, mode: str, num_tokens: int) -> Sample:
        """Hands one new prompt over. Both instances have nothing to do before and after."""
        prompt = Prompt(num_tokens, secrets.randbits(48))
        name = f"{mode}-{self._num_asked}"
        self._num_asked += 1
        for each in (self._p, self._d):
            each.stage(prompt)
        sent, answered, asked = self._ask(mode, name, prompt)
        first, _ = self._d.wait("first", name)
        _, facts = self._d.wait("done", name)
        if facts["error"]:
            raise RuntimeError(f"D: {facts['error']}")
        step = decode_step(facts["times"])
        begins = asked if mode in ("settled", "computed") else answered
        sample = Sample(
            store=self.store,
            mode=mode,
            tokens=num_tokens,
            exposed_s=first - begins - step,
            ttft_s=first - (asked if mode == "computed" else sent),
            prefill_s=answered - sent,
            d_computed=facts["computed"],
            reason=facts["reason"],
            saved_s=asked - answered if mode == "settled" else None,
        )
        for each in (self._p, self._d):
            each.settle()
        return sample

    def lead(self, num_tokens: int) -> float:
        """Hands one more prompt over to a P and a D that are asked at once.

        Returns the seconds from the beginning of D's load to P's last marker, `done`: negative if
        D began after it, minus infinity if it loaded nothing.
        """
        for each in (self._p, self._d):
            each.record()
        self.hand_over("concurrent", num_tokens)
        markers = [span.ended for span in self._p.recorded() if span.name == "marker"]
        loads = [span.began for span in self._d.recorded() if span.name == "begin load"]
        return max(markers) - loads[0] if markers and loads else -math.inf

    def burst(self, num_tokens: int, at_once: int) -> tuple[list[float], list[float]]:
        """Seconds to the first token of prompts handed over at once; and by one instance alone.

        By the instances' clocks: the client reads one of them at a time.
        """
        prompts = [Prompt(num_tokens, secrets.randbits(48)) for _ in range(at_once)]
        names = [f"burst-{self._num_asked}-{i}" for i in range(at_once)]
        self._num_asked += 1
        for prompt in prompts:
            self._p.stage(prompt)
            self._d.stage(prompt)
        began = now()
        for name, prompt in zip(names, prompts, strict=True):
            self._p.ask(Ask(name, prompt, 1, REMOTE_DECODE))
        for name, prompt in zip(names, prompts, strict=True):  # P answers in order
            _, facts = self._p.wait("done", name)
            self._d.ask(Ask(name, prompt, NUM_DECODED, facts["handoff"]))
        handed = [self._d.wait("first", name)[1] - began for name in names]
        for name in names:
            self._d.wait("done", name)
        for each in (self._p, self._d):
            each.settle()
        return handed, self._burst_alone(names, prompts)

    def _burst_alone(self, names: list[str], prompts: list[Prompt]) -> list[float]:
        assert self._alone is not None
        for prompt in prompts:
            self._alone.stage(prompt)
        began = now()
        for name, prompt in zip(names, prompts, strict=True):
            self._alone.ask(Ask(name, prompt, NUM_DECODED))
        firsts = [self._alone.wait("first", name)[1] - began for name in names]
        for name in names:
            self._alone.wait("done", name)
        self._alone.settle()
        return firsts

    def _ask(self, mode: str, name: str, prompt: Prompt) -> tuple[float, float, float]:
        """When P was asked, when it had answered, when D was asked."""
        if mode == "computed":
            asked = self._d.ask(Ask(name, prompt, NUM_DECODED))
            return asked, asked, asked
        params: dict[str, Any] = REMOTE_DECODE  # as a router asks P, which any connector knows
        if mode == "concurrent":
            params = {"pdstore": {"attempt": secrets.token_hex(16)}}
        sent = self._p.ask(Ask(name, prompt, 1, params))
        if mode == "concurrent":
            asked = self._d.ask(Ask(name, prompt, NUM_DECODED, params))
        answered, facts = self._p.wait("done", name)
        if facts["error"]:
            raise RuntimeError(f"P: {facts['error']}")
        if mode == "settled":
            self._p.settle()
        if mode != "concurrent":
            asked = self._d.ask(Ask(name, prompt, NUM_DECODED, facts["handoff"]))
        return sent, answered, asked


def prefill_alone(instance: Instance, num_tokens: int) -> float:
    """Seconds from the request to its one token, by an instance without a pool."""
    prompt = Prompt(num_tokens, secrets.randbits(48))
    instance.stage(prompt)
    sent = instance.ask(Ask("alone", prompt, 1))
    answered, _ = instance.wait("done", "alone")
    instance.settle()
    return answered - sent


def decode_step(times: list[float]) -> float:
    """The median gap between tokens, in seconds."""
    return median(b - a for a, b in pairwise(times))
