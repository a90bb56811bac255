"""The demo's results: what was seen, whether that is right, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from examples.demo.client import Answer

Json: TypeAlias = dict[str, object]

MAX_LOGPROB_DIFF = 1e-3
MAX_COMPUTED_TOKENS = 1

_TEXT_WIDTH = 16
_HEADINGS = (
    "prompt tokens",
    "D loaded",
    "D computed",
    "first token",
    "same answer",
    "logprob diff",
    "answer",
)


@dataclass(frozen=True)
class Row:
    """One prompt: what D did for it, and whether it says what one instance alone says."""

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
        """Of D's answer and the one of an instance that works alone."""
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
        """One line of the table."""
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
        """Its numbers; a difference that is none (other lengths, NaN) is null."""
        shown = {name: value for name, value in asdict(self).items() if name != "text"}
        if math.isinf(self.max_logprob_diff):
            shown["max_logprob_diff"] = None
        return shown


@dataclass(frozen=True)
class Run:
    """All prompts through P and D once, and what the instances counted meanwhile.

    used: pdstore's counters, P's and D's, added up by name.
    saved, loaded: tokens P saved to the pool and D loaded from it, by their counters.
    fed: tokens D fed to its model, by the engine's own counter; answered: tokens in all answers.
    """

    rows: Sequence[Row]
    used: float
    saved: float
    loaded: float
    fed: float
    answered: int

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def fed_of_prompts(self) -> float:
        """Prompt tokens D computed: each answer's last token is never fed."""
        return self.fed - (self.answered - len(self.rows))


def _max_diff(some: Sequence[float], others: Sequence[float]) -> float:
    diffs = [abs(a - b) for a, b in zip(some, others, strict=False)]
    is_number = diffs and len(some) == len(others) and not any(map(math.isnan, diffs))
    return max(diffs) if is_number else math.inf


def problems_of(on: Run, off: Run) -> list[str]:
    """What is wrong, in words; nothing when the hand-off did what it promises."""
    found = [
        f"prompt {number}: {what}"
        for number, row in enumerate(on.rows, 1)
        for is_wrong, what in (
            (not row.is_same, "the answer differs from that of one instance alone"),
            (
                row.computed_tokens > MAX_COMPUTED_TOKENS,
                f"D computed {row.computed_tokens} tokens (reason: {row.reason})",
            ),
        )
        if is_wrong
    ]
    answered_as_loaded = sum(row.loaded_tokens for row in on.rows)
    checks = (
        (on.saved > 0, "P's counters say that it saved nothing to the pool"),
        (
            0 < answered_as_loaded <= on.loaded <= on.prompt_tokens,
            f"D counted {on.loaded:.0f} loaded tokens, its answers say {answered_as_loaded}",
        ),
        (
            on.fed_of_prompts <= MAX_COMPUTED_TOKENS * len(on.rows),
            f"D fed {on.fed_of_prompts:.0f} prompt tokens to its model",
        ),
        (off.used == 0, f"switched off: pdstore counted {off.used:.0f} on P and D instead of 0"),
        (
            off.fed_of_prompts == off.prompt_tokens
            and all(row.computed_tokens == row.prompt_tokens for row in off.rows),
            "switched off: D did not compute every prompt token",
        ),
        (all(row.is_same for row in off.rows), "switched off: an answer differs"),
    )
    return found + [what for is_right, what in checks if not is_right]


def table(rows: Sequence[Row]) -> str:
    """One line a prompt, in columns."""
    lines = [_HEADINGS, *(row.cells() for row in rows)]
    numbers = range(len(_HEADINGS) - 1)
    widths = [max(len(line[i]) for line in lines) for i in numbers]
    return "\n".join(
        "  ".join([*(line[i].rjust(widths[i]) for i in numbers), line[-1]]) for line in lines
    )


def control_line(off: Run) -> str:
    """The run without the switch, in one line."""
    loaded = sum(row.loaded_tokens for row in off.rows)
    same = sum(row.is_same for row in off.rows)
    return (
        f"switch off: D computed {off.fed_of_prompts:.0f} of {off.prompt_tokens} tokens,"
        f" loaded {loaded}; pdstore counted {off.used:.0f}; {same} of {len(off.rows)} same answers"
    )


def verdict(on: Run, problems: Sequence[str]) -> str:
    """The last line."""
    if problems:
        return f"FAILED: {len(problems)} of the demo's checks, first: {problems[0]}"
    return (
        f"OK: {len(on.rows)} of {len(on.rows)} answers are those of one instance alone;"
        f" D computed {on.fed_of_prompts:.0f} of {on.prompt_tokens} prompt tokens"
    )


def as_json(on: Run, off: Run, problems: Sequence[str]) -> Json:
    """What `--json` writes."""
    return {
        "ok": not problems,
        "problems": list(problems),
        "requests": [row.as_json() for row in on.rows],
        "control": {"pdstore_counters": off.used, "requests": [row.as_json() for row in off.rows]},
    }
