"""The demo's results: the numbers of each run, their check, and their text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeAlias

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


@dataclass(frozen=True)
class Run:
    """All prompts through P and D once, and the instances' counters meanwhile.

    used: pdstore's counters, P's and D's, added up by name.
    saved, loaded: tokens P saved to the pool and D loaded from it, by pdstore's counters.
    computed: prompt tokens D computed, by the engine's own counters.
    """

    rows: Sequence[Row]
    used: float
    saved: float
    loaded: float
    computed: float

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def num_same(self) -> int:
        return sum(row.is_same for row in self.rows)


class Runs(NamedTuple):
    """The runs. on: with the switch on, behind the router. plain: behind the plain proxy. off."""

    on: Run
    plain: Run
    off: Run


def _max_diff(some: Sequence[float], others: Sequence[float]) -> float:
    diffs = [abs(a - b) for a, b in zip(some, others, strict=False)]
    is_number = diffs and len(some) == len(others) and not any(map(math.isnan, diffs))
    return max(diffs) if is_number else math.inf


def problems_of(runs: Runs) -> list[str]:
    """Returns a sentence for each promise that the hand-off broke; none if it kept them all."""
    on, plain, off = runs
    found = _handoff_problems(on)
    if not on.saved:
        found.append("P's counters say that it saved nothing to the pool")
    found += [f"plain proxy: {problem}" for problem in _handoff_problems(plain)]
    checks = (
        (off.used == 0, f"pdstore counted {off.used:.0f} on P and D instead of 0"),
        (
            off.computed == off.prompt_tokens
            and all(row.computed_tokens == row.prompt_tokens for row in off.rows),
            "D did not compute every prompt token",
        ),
        (off.num_same == len(off.rows), "an answer differs"),
    )
    return found + [f"switched off: {problem}" for is_right, problem in checks if not is_right]


def _handoff_problems(run: Run) -> list[str]:
    found = [
        f"prompt {number}: {what}"
        for number, row in enumerate(run.rows, 1)
        for is_wrong, what in (
            (not row.is_same, "the answer differs from that of one instance alone"),
            (
                row.computed_tokens > MAX_COMPUTED_TOKENS,
                f"D computed {row.computed_tokens} tokens (reason: {row.reason})",
            ),
        )
        if is_wrong
    ]
    said = sum(row.loaded_tokens for row in run.rows)
    if not 0 < said <= run.loaded <= run.prompt_tokens:
        found.append(f"D counted {run.loaded:.0f} loaded tokens, its answers say {said}")
    if run.computed > MAX_COMPUTED_TOKENS * len(run.rows):
        found.append(f"D computed {run.computed:.0f} prompt tokens, by the engine's counters")
    return found


def table(rows: Sequence[Row]) -> str:
    """Returns one line per prompt, in columns."""
    lines = [_HEADINGS, *(row.cells() for row in rows)]
    numbers = range(len(_HEADINGS) - 1)
    widths = [max(len(line[i]) for line in lines) for i in numbers]
    return "\n".join(
        "  ".join([*(line[i].rjust(widths[i]) for i in numbers), line[-1]]) for line in lines
    )


def lines(runs: Runs) -> tuple[str, str]:
    """Returns a line for each run that the table does not show."""
    _, plain, off = runs
    return (
        f"plain proxy: {_summary(plain)}",
        f"switch off: {_summary(off)}; pdstore counted {off.used:.0f}",
    )


def _summary(run: Run) -> str:
    loaded = sum(row.loaded_tokens for row in run.rows)
    return (
        f"D loaded {loaded} and computed {run.computed:.0f} of {run.prompt_tokens} tokens;"
        f" {run.num_same} of {len(run.rows)} same answers"
    )


def verdict(on: Run, problems: Sequence[str]) -> str:
    """Returns the last line of the output."""
    if problems:
        return f"FAILED: {len(problems)} of the demo's checks, first: {problems[0]}"
    return (
        f"OK: {len(on.rows)} of {len(on.rows)} answers are those of one instance alone;"
        f" D computed {on.computed:.0f} of {on.prompt_tokens} prompt tokens"
    )


def as_json(runs: Runs, problems: Sequence[str]) -> Json:
    """Returns the object that `--json` writes."""
    requests = {name: [row.as_json() for row in run.rows] for name, run in runs._asdict().items()}
    return {
        "ok": not problems,
        "problems": list(problems),
        "requests": requests["on"],
        "plain_proxy": {"requests": requests["plain"]},
        "control": {"pdstore_counters": runs.off.used, "requests": requests["off"]},
    }
