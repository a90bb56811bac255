"""Row: one prompt of the demo, and how it went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from examples.demo.client import Answer

Json: TypeAlias = dict[str, object]

MAX_LOGPROB_DIFF = 1e-3

_TEXT_WIDTH = 16


@dataclass(frozen=True)
class Row:
    """One prompt: the tokens that D loaded and computed, and the comparison of its answer."""

    prompt_tokens: int
    loaded_tokens: int
    computed_tokens: int
    ttft_s: float
    same_ids: bool
    max_logprob_diff: float
    reason: str | None = None
    text: str = ""

    @classmethod
    def of(cls, answer: Answer, alone: Answer) -> Row:
        """Returns the row of D's answer and of the answer of an instance that works alone."""
        return cls(
            prompt_tokens=answer.prompt_tokens,
            loaded_tokens=answer.loaded_tokens,
            computed_tokens=answer.computed_tokens,
            ttft_s=answer.ttft_s,
            same_ids=bool(answer.token_ids) and answer.token_ids == alone.token_ids,
            max_logprob_diff=_max_diff(answer.logprobs, alone.logprobs),
            reason=answer.reason,
            text=answer.text,
        )

    @property
    def is_same(self) -> bool:
        return self.same_ids and self.max_logprob_diff <= MAX_LOGPROB_DIFF

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of one line of the table."""
        return (
            str(self.prompt_tokens),
            str(self.loaded_tokens),
            str(self.computed_tokens),
            f"{self.ttft_s * 1000:.0f} ms",
            "yes" if self.is_same else "NO",
            f"{self.max_logprob_diff:.0e}",
            " ".join(self.text.split())[:_TEXT_WIDTH],
        )

    def as_json(self) -> Json:
        """Returns its numbers; an infinite difference (other lengths, NaN) becomes null."""
        shown = {name: value for name, value in asdict(self).items() if name != "text"}
        if math.isinf(self.max_logprob_diff):
            shown["max_logprob_diff"] = None
        return shown


def _max_diff(some: Sequence[float], others: Sequence[float]) -> float:
    diffs = [abs(a - b) for a, b in zip(some, others, strict=False)]
    is_number = diffs and len(some) == len(others) and not any(map(math.isnan, diffs))
    return max(diffs) if is_number else math.inf
