"""Machine: one engine and one store in simulated time, for which PromptTimes decides."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdstore.scheduler.break_even import Mode, PromptTimes

TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
"""KV of a token of an 8B Llama in bf16."""
STEP_S, TOKEN_S, PAIR_S = 0.006, 2.16e-5, 5.1e-10
"""A step's fixed time, and what a token and a pair of tokens add: fits 8,192 tokens in 0.21 s and
32,768 in 1.26 s, measured with vLLM on one H200."""
STEP_TOKENS = 8192
LATENCY_S = 0.002


class Load(NamedTuple):
    """A request's load, and the time at which the store begins with it."""

    name: int
    num_tokens: int
    begins_at: float


@dataclass
class Job:
    """The part of a prompt that the engine has to compute."""

    name: int
    at: int
    stop: int


class Machine:
    """Runs requests whose whole prompts are stored. Loads share the store's rate evenly.

    The engine computes prompts in the order in which they are ready, `STEP_TOKENS` tokens a step.

    store_gb_s: the store's rate for all loads together.
    jitter: relative deviation of each step and of the store's rate.
    """

    def __init__(self, mode: Mode, store_gb_s: float, jitter: float, seed: int) -> None:
        self.now_s = 0.0
        self._tokens_per_s = store_gb_s * 1e9 / TOKEN_BYTES
        self._chance, self._jitter = random.Random(seed), jitter
        self._prompt_times = PromptTimes(mode, 64, clock=lambda: self.now_s)
        self._num_named = 0
        self._num_tokens = 0  # of each prompt of the wave
        self._rate = self._tokens_per_s
        self._loads: dict[int, float] = {}  # tokens that are still to come
        self._starting: deque[Load] = deque()
        self._after_load: dict[int, Job] = {}
        self._queue: deque[Job] = deque()
        self._step: list[tuple[int, int, int]] = []
        self._step_began = self._step_ends = 0.0

    def wave(self, at_once: int, num_tokens: int) -> list[float]:
        """Requests that arrive together; returns the seconds that each took to its prompt's KV."""
        began_s = self.now_s
        took_s: list[float] = []
        self._rate = self._tokens_per_s * self._factor()
        self._num_tokens = num_tokens
        for _ in range(at_once):
            self._arrive(num_tokens)
        while len(took_s) < at_once:
            num_ended = self._advance()
            took_s += [self.now_s - began_s] * num_ended
        return took_s

    def rest(self, seconds: float) -> None:
        self.now_s += seconds

    def _arrive(self, num_tokens: int) -> None:
        name, self._num_named = self._num_named, self._num_named + 1
        decided = self._prompt_times.decide(name, start=0, found=num_tokens, num_tokens=num_tokens)
        loaded = decided.num_tokens
        if loaded:
            self._starting.append(Load(name, loaded, self.now_s + LATENCY_S))
            self._after_load[name] = Job(name, loaded, num_tokens)
        else:
            self._queue.append(Job(name, 0, num_tokens))

    def _advance(self) -> int:
        """Goes on to the next event: a step's end, a load's beginning or its end.

        Returns how many prompts are whole by it.
        """
        if not self._step and self._queue:
            self._begin_step()
        at = min(self._next_times())
        passed, self.now_s = at - self.now_s, at
        share = passed * self._rate / max(1, len(self._loads))
        for name in self._loads:
            self._loads[name] -= share
        self._end_loads()
        while self._starting and self._starting[0].begins_at <= self.now_s:
            load = self._starting.popleft()
            self._loads[load.name] = load.num_tokens
        if self._step and self._step_ends <= self.now_s:
            return self._end_step()
        return 0

    def _next_times(self) -> Sequence[float]:
        times = [self._starting[0].begins_at] if self._starting else []
        if self._loads:
            left = max(0.0, min(self._loads.values()))
            times.append(self.now_s + left * len(self._loads) / self._rate)
        if self._step:
            times.append(self._step_ends)
        return times

    def _end_loads(self) -> None:
        for name in [name for name, left in self._loads.items() if left <= 1e-6]:
            del self._loads[name]
            job = self._after_load.pop(name)
            self._prompt_times.load_ended(name, job.at)
            job.at = min(job.at, job.stop - 1)  # the last token's logits are needed
            self._queue.append(job)

    def _begin_step(self) -> None:
        room, seconds = STEP_TOKENS, STEP_S
        while self._queue and room:
            job = self._queue[0]
            stop = min(job.stop, job.at + room)
            tokens = stop - job.at
            self._step.append((job.name, job.at, stop))
            seconds += TOKEN_S * tokens + PAIR_S * tokens * (job.at + stop)
            room, job.at = room - tokens, stop
            if job.at == job.stop:
                self._queue.popleft()
        self._step_began, self._step_ends = self.now_s, self.now_s + seconds * self._factor()

    def _end_step(self) -> int:
        step, self._step = self._step, []
        self._prompt_times.computed(step, self.now_s - self._step_began)
        ended = [name for name, _, stop in step if stop == self._num_tokens]
        for name in ended:
            self._prompt_times.forget(name)
        return len(ended)

    def _factor(self) -> float:
        return max(0.5, self._chance.gauss(1.0, self._jitter))
