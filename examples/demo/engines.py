"""The engines of the demo: the command of an instance and the meaning of its counters."""

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
        """Returns the command that starts an instance."""
        given = ["--model", str(model), "--role", role, "--port", str(port)]
        return [sys.executable, "-m", self.module, *given, *self.options]

    @abstractmethod
    def computed(self, counted: Counters, answers: Sequence[Answer]) -> float:
        """Returns the prompt tokens computed for these answers, by the instance's own counters."""

    @abstractmethod
    def explain(self, answer: Answer, counted: Counters) -> None:
        """Fills in the tokens that D loaded and computed. `counted`: D's, for this answer alone."""


class MiniEngine(Engine):
    """The mini engine: each answer says how many tokens it loaded and computed."""

    module = "examples.mini_engine"
    options = ("--served-model-name", "demo")
    ready_s = 120.0

    def computed(self, counted: Counters, answers: Sequence[Answer]) -> float:
        """Subtracts the answers' tokens, which are fed to the model too, except each last one."""
        fed_of_answers = sum(len(answer.token_ids) - 1 for answer in answers)
        return counted["mini_engine_computed_tokens_total"] - fed_of_answers

    def explain(self, answer: Answer, counted: Counters) -> None:
        said = answer.usage["pdstore"]
        answer.loaded_tokens = said["loaded_tokens"]
        answer.computed_tokens = said["computed_tokens"]
        answer.reason = said["reason"]


class Vllm(Engine):
    """vLLM: counts prompt tokens by source. `cached_tokens` in its answers is about P, not D."""

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
