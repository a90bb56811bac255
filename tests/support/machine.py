"""Machine: one engine and one store in simulated time, for which PromptTimes decides."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pdstore.scheduler.break_even import PromptTimes

Way: TypeAlias = Literal["always", "never", "auto"]

TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
"""KV of a token of an 8B Llama in bf16."""
STEP_S, TOKEN_S, PAIR_S = 0.006, 2.16e-5, 4.7e-10
"""A step's fixed time, and what a token and a pair of tokens add: as measured with vLLM and an 8B
model on one H200, within 5 %."""
READ_S = TOKEN_BYTES / 4e12
"""Time of a step for each token before those that answers decode in it."""
STEP_TOKENS, ANSWER_TOKENS = 8192, 32
MAX_NEW = 256
"""Tokens at the end of a prompt, at most, that nobody has stored."""
COLD_S = 0.1
"""Time that the loads take longer that begin before any has ended."""
PAUSE = 0.2
"""Part of the time of an answer, at most, that passes until its user asks again."""


class Store(NamedTuple):
    """A store's rate for all loads together, and the time before a load's first byte."""

    name: str
    gb_s: float
    latency_s: float


@dataclass
class Prompt:
    """A prompt that has no first token yet, in tokens.

    at: what is there. end: what is there when its load has ended. left: what is still to come.
    counts: its time is one of the results. is_begun: a step has computed a part of it.
    """

    number: int
    num_tokens: int
    asked_at: float
    counts: bool
    end: int = 0
    at: int = 0
    left: float = 0.0
    begins_at: float = 0.0
    loaded_at: float = 0.0
    is_begun: bool = False


class Machine:
    """Runs requests whose prompts are stored but for a few tokens.

    `at_once` users each wait for a first token, and ask again after a pause. Answers decode beside
    that.

    A step has at most `STEP_TOKENS` tokens of prompts: first of one that is begun, then in the
    order of asking. What arrives or is loaded is seen between steps. The store brings loads in the
    order of KVPool's deadlines. All ways meet the same prompts.

    jitter: relative deviation of each step and of each load.
    state_tokens: the tokens whose KV has as many bytes as the state that each load brings as well,
      if layers keep states; a part of a prompt is not loaded then.
    """

    def __init__(
        self, way: Way, store: Store, jitter: float, seed: int = 0, state_tokens: int = 0
    ) -> None:
        self._now_s = 0.0
        self._store, self._jitter = store, jitter
        self._chance, self._of_prompts = random.Random(seed), random.Random(seed)
        self._seed = seed
        self._times = PromptTimes(
            "auto" if way == "auto" else "never",
            64,
            may_split=not state_tokens,
            clock=lambda: self._now_s,
        )
        self._state_tokens = state_tokens
        self._loads_all = way == "always"
        self._is_cold = True
        self._loads: list[Prompt] = []
        self._queue: list[Prompt] = []
        self._decoding: list[tuple[int, int]] = []  # tokens of the prompt, steps to go

    def run(
        self,
        at_once: int,
        lengths: Sequence[int],
        num_requests: int,
        first: int = 0,
    ) -> list[float]:
        """Returns the seconds that requests took to their first tokens.

        first: the number of the first one that may count: those that are asked before all earlier
          ones have their first token do not.
        """
        took: list[float] = []
        asks_at = [0.0] * at_once
        num_asked = num_counted = 0
        num_early = first
        while len(took) < num_requests:
            is_time = num_counted < num_requests
            if is_time and not num_early and not num_counted:
                self._of_prompts.seed(self._seed)
            for _ in [at for at in asks_at if at <= self._now_s] if is_time else []:
                num_counted += not num_early
                self._ask(num_asked, lengths, counts=not num_early)
                num_asked += 1
            if is_time:
                asks_at = [at for at in asks_at if at > self._now_s]
            for prompt in self._step(min(asks_at, default=math.inf) if is_time else math.inf):
                seconds = self._now_s - prompt.asked_at
                took += [seconds] if prompt.counts else []
                num_early -= prompt.number < first
                pause = self._chance.uniform(0, PAUSE) * seconds
                asks_at.append(self._now_s + pause)
        return took

    def _ask(self, number: int, lengths: Sequence[int], counts: bool) -> None:
        num_tokens = self._of_prompts.choice(lengths)
        found = num_tokens - self._of_prompts.randrange(MAX_NEW)
        found -= found % 64
        decided = self._times.decide(number, start=0, found=found, num_tokens=num_tokens)
        prompt = Prompt(number, num_tokens, self._now_s, counts)
        prompt.end = found if self._loads_all else decided.num_tokens
        if prompt.end:
            prompt.left = (prompt.end + self._state_tokens) * self._factor()
            prompt.begins_at = self._now_s + self._store.latency_s + COLD_S * self._is_cold
            self._loads.append(prompt)
        else:
            self._queue.append(prompt)

    def _step(self, next_ask: float) -> list[Prompt]:
        """Computes what is ready; returns the prompts that are there now."""
        self._end_loads()
        room, seconds = STEP_TOKENS, sum(READ_S * tokens for tokens, _ in self._decoding)
        for prompt in self._queue:
            tokens = min(prompt.num_tokens - prompt.at, room)
            if tokens:
                self._times.begin_step(prompt.number, prompt.at, prompt.at + tokens)
                seconds += TOKEN_S * tokens + PAIR_S * tokens * (2 * prompt.at + tokens)
                room -= tokens
                prompt.at += tokens
                prompt.is_begun = True
        if self._decoding or self._queue:
            self._pass((STEP_S + seconds) * self._factor())
        else:
            self._pass(next_ask - self._now_s, until_loaded=True)
        ended = [prompt for prompt in self._queue if prompt.at == prompt.num_tokens]
        for prompt in ended:
            self._times.end_prompt(prompt.number)
            self._queue.remove(prompt)
        self._decoding = [(tokens, left - 1) for tokens, left in self._decoding if left > 1]
        self._decoding += [(prompt.num_tokens, ANSWER_TOKENS) for prompt in ended]
        return ended

    def _end_loads(self) -> None:
        for prompt in [prompt for prompt in self._loads if prompt.loaded_at]:
            self._is_cold = False
            self._loads.remove(prompt)
            seconds = prompt.loaded_at - prompt.asked_at
            self._times.load_ended(prompt.number, prompt.end, seconds)
            prompt.at = min(prompt.end, prompt.num_tokens - 1)  # the last one's logits are needed
            self._queue.append(prompt)
            self._queue.sort(key=lambda prompt: (not prompt.is_begun, prompt.number))

    def _pass(self, seconds: float, until_loaded: bool = False) -> None:
        """Lets time pass, in which the store goes on with its loads."""
        end = self._now_s + seconds
        tokens_per_s = self._store.gb_s * 1e9 / TOKEN_BYTES
        while self._now_s < end:
            loads = [prompt for prompt in self._loads if not prompt.loaded_at]
            if until_loaded and len(loads) < len(self._loads):
                return
            begun = [prompt for prompt in loads if prompt.begins_at <= self._now_s]
            events = [prompt.begins_at for prompt in loads if prompt.begins_at > self._now_s]
            if begun:  # as KVPool's workers take them
                load = min(begun, key=lambda load: load.asked_at + load.end * TOKEN_BYTES / 1e9)
                events.append(self._now_s + load.left / tokens_per_s)
            passed = min([*events, end]) - self._now_s
            self._now_s += passed
            if begun:
                load.left -= passed * tokens_per_s
                load.loaded_at = self._now_s if load.left <= 1e-3 else 0.0

    def _factor(self) -> float:
        return max(0.5, self._chance.gauss(1.0, self._jitter))


NUM_SEEDS, NUM_LEARNING, NUM_REQUESTS = 4, 256, 384


def p99_of(
    way: Way,
    store: Store,
    at_once: int,
    lengths: Sequence[int],
    jitter: float,
    state_tokens: int = 0,
) -> float:
    """Returns the p99 of the seconds to the first token over four seeds.

    The first 256 requests, in which `auto` learns, do not count.
    """
    took: list[float] = []
    for seed in range(NUM_SEEDS):
        machine = Machine(way, store, jitter, seed, state_tokens)
        took += machine.run(at_once, lengths, NUM_REQUESTS, first=NUM_LEARNING)
    return sorted(took)[math.ceil(0.99 * len(took)) - 1]
