"""One run: every kind of hand-off in each round, in an order drawn anew."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks.handoff.engines import Setup
from benchmarks.handoff.instance import Instance
from benchmarks.handoff.measure import MODES, Client, Sample, prefill_alone
from benchmarks.handoff.recorder import now
from benchmarks.peers import PEER_MODES

_NUM_LEADS = 6  # one of which has to be early, also on a busy machine
_REST_S = 0.1  # a prompt asked for right behind another instance's took 1 to 5 % longer


@dataclass
class Run:
    """The plan of a run, and its results.

    prefills: seconds of a lone instance's prefill, by the prompt's tokens.
    controls: those of the instance for --control.
    bursts: seconds to the first token of prompts that come at once.
    leads: seconds from the beginning of D's load to P's `done`.
    """

    given: argparse.Namespace
    setup: Setup
    began: float
    prefills: dict[int, list[float]] = field(default_factory=dict)
    controls: dict[int, list[float]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    bursts: list[dict[str, Any]] = field(default_factory=list)
    leads: list[dict[str, Any]] = field(default_factory=list)

    def measure(self) -> None:
        """Asks for each kind in each round; what the first round finds is thrown away."""
        clients = self._clients()
        for is_counted in self._rounds():
            for tokens in self.given.tokens:
                self._ask_all(clients, tokens)
            if not is_counted:
                for found in (self.samples, self.prefills, self.controls):
                    found.clear()
        for is_counted in self._rounds() if self.given.burst else ():
            bursts = [self._burst(client) for client in clients]
            self.bursts += bursts if is_counted else []

    def measure_leads(self) -> None:
        """Hands over a few more prompts, to see how early D's loads begin."""
        tokens = max(self.given.tokens)
        for client in self._clients():
            leads = [client.lead(tokens) for _ in range(_NUM_LEADS)]
            self.leads.append({"store": client.store, "tokens": tokens, "lead_s": leads})

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _clients(self) -> list[Client]:
        alone = self.setup.alone
        return [Client(name, p, d, alone) for name, (p, d) in self.setup.pairs.items()]

    def _rounds(self) -> Iterator[bool]:
        for number in range(self.given.rounds + 1):
            if time.monotonic() - self.began > self.given.seconds:
                self.say("no time for more")
                return
            yield number > 0
            self.say(f"round {number} of {self.given.rounds}")

    def _ask_all(self, clients: list[Client], tokens: int) -> None:
        """Asks for one prompt of each kind. All are asked after the same rest, in any order."""
        asks: list[Callable[[], None]] = [
            partial(self._hand_over, client, mode, tokens)
            for client in clients
            for mode in modes_of(client.store, self.given.modes)
        ]
        if self.setup.alone is not None:
            asks.append(partial(self._prefill, self.setup.alone, self.prefills, tokens))
        if self.setup.control is not None:
            asks.append(partial(self._prefill, self.setup.control, self.controls, tokens))
        random.shuffle(asks)
        for ask in asks:
            time.sleep(_REST_S)
            ask()

    def _hand_over(self, client: Client, mode: str, tokens: int) -> None:
        tokens = self.setup.tokens_of(client.store, tokens)
        self.samples.append(client.hand_over(mode, tokens))

    def _prefill(self, instance: Instance, taken: dict[int, list[float]], tokens: int) -> None:
        taken.setdefault(tokens, []).append(prefill_alone(instance, tokens))

    def _burst(self, client: Client) -> dict[str, Any]:
        tokens, at_once = self.given.burst_tokens, self.given.burst
        handed, alone = client.burst(tokens, at_once)
        return {
            "store": client.store,
            "tokens": tokens,
            "at_once": at_once,
            "ttft_s": handed,
            "alone_ttft_s": alone,
        }


def modes_of(pair: str, asked: Sequence[str]) -> list[str]:
    """Returns the modes that are asked for, as far as a pair has them, by its name."""
    known = PEER_MODES.get(pair.split()[0], MODES)
    return [mode for mode in asked if mode in known]


def measure_floor() -> dict[str, float]:
    """Returns the link's own limit: the GB/s of one pinned copy of 256 MiB each way."""
    import torch

    size = 256 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found = {}
    last = torch.cuda.device_count() - 1
    for name, gpu, is_out in (("out of P, GB/s", 0, True), ("into D, GB/s", last, False)):
        device = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
        times = []
        for _ in range(9):
            torch.cuda.synchronize(gpu)
            began = now()
            (host if is_out else device).copy_(device if is_out else host, non_blocking=True)
            torch.cuda.synchronize(gpu)
            times.append(now() - began)
        found[name] = size / median(times) / 1e9
    return found
