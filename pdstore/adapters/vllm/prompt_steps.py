"""PromptSteps: tells BreakEven when vLLM has computed which part of its prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pdstore.scheduler.break_even import BreakEven, Outcome


class PromptSteps:
    """Measures prompts from the scheduler's side, which is not told when a step ends.

    vLLM may schedule a step before the one before it has ended. But a request has its first token
    only when its prompt is computed. So the time is cut there, and a piece of time belongs to all
    tokens of prompts that were scheduled in it.
    """

    def __init__(self, break_even: BreakEven, clock: Callable[[], float] = time.monotonic) -> None:
        self._break_even, self._clock = break_even, clock
        self._running: dict[str, Any] = {}  # requests whose prompt is being computed
        self._chunks: list[tuple[str, int, int]] = []
        self._since = 0.0

    def scheduled(self, steps: Iterable[tuple[Any, int]]) -> None:
        """Takes up a step: requests, each with how many of its tokens are computed."""
        for request, num_tokens in steps:
            start, end = request.num_computed_tokens, request.num_prompt_tokens
            if start >= end or request.num_output_tokens:
                continue
            if not self._running:
                self._since = self._clock()
            self._running[request.request_id] = request
            self._chunks.append((request.request_id, start, min(start + num_tokens, end)))

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the prompts that were computed since the last call."""
        ended = [name for name, request in self._running.items() if request.num_output_tokens]
        if not ended:
            return []
        for name in ended:
            del self._running[name]
        chunks, self._chunks = self._chunks, []
        before, self._since = self._since, self._clock()
        return self._break_even.computed(chunks, self._since - before)

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended."""
        self._running.pop(request_id, None)
        self._chunks = [chunk for chunk in self._chunks if chunk[0] != request_id]
