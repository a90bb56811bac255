"""The engines of the demo: how an instance is started, and what its counters say."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

from examples.demo.client import Answer

Counters: TypeAlias = Mapping[str, float]


class Engine(ABC):
    """One engine; each instance is a process that serves OpenAI's completions."""

    module: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    ready_s: ClassVar[float]

    def command(self, model: Path, role: str, port: int) -> list[str]:
        """What starts an instance."""
        given = ["--model", str(model), "--role", role, "--port", str(port)]
        return [sys.executable, "-m", self.module, *given, *self.options]

    @abstractmethod
    def computed(self, counted: Counters, answers: Sequence[Answer]) -> float:
        """Prompt tokens that an instance computed for these answers, by its own counters."""

    @abstractmethod
    def explain(self, answer: Answer, counted: Counters) -> None:
        """Adds to an answer how D came to it. `counted`: by D, for this answer alone."""


class MiniEngine(Engine):
    """Says in each answer what it loaded and computed."""

    module = "examples.mini_engine"
    options = ("--served-model-name", "demo")
    ready_s = 120.0

    def computed(self, counted: Counters, answers: Sequence[Answer]) -> float:
        """It counts the tokens that it feeds to its model: each answer's last one is not."""
        fed_of_answers = sum(len(answer.token_ids) - 1 for answer in answers)
        return counted["mini_engine_computed_tokens_total"] - fed_of_answers

    def explain(self, answer: Answer, counted: Counters) -> None:
        said = answer.usage["pdstore"]
        answer.loaded_tokens = said["loaded_tokens"]
        answer.computed_tokens = said["computed_tokens"]
        answer.reason = said["reason"]


class Vllm(Engine):
    """Counts where prompt tokens come from. What its answers call cached was so on P, not on D."""

    module = "examples.vllm_serve"
    options = ("--tiny", "--served-model-name", "demo")
    ready_s = 300.0

    def computed(self, counted: Counters, answers: Sequence[Answer]) -> float:
        return _from("local_compute", counted)

    def explain(self, answer: Answer, counted: Counters) -> None:
        answer.loaded_tokens = int(_from("external_kv_transfer", counted))
        answer.computed_tokens = int(_from("local_compute", counted))
        answer.reason = _miss_reason(counted)


def _from(source: str, counted: Counters) -> float:
    return counted.get(f"vllm:prompt_tokens_by_source_total:{source}", 0.0)


def _miss_reason(counted: Counters) -> str | None:
    name = "pdstore_misses_total:"
    reasons = [key.removeprefix(name) for key in counted if key.startswith(name) and counted[key]]
    return ", ".join(reasons) or None


ENGINES: dict[str, Engine] = {"mini": MiniEngine(), "vllm": Vllm()}
"""Engines by name."""
