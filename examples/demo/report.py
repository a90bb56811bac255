"""The demo's results: the numbers of each run, their check, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demo.conversation import Conversation
from examples.demo.row import Json, Row

MAX_COMPUTED_TOKENS = 1

_WIDE = 250

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
    """The runs. on: with the switch on, behind the router. plain: behind the plain proxy. off.

    turns: two turns of a conversation, with the switch on.
    """

    on: Run
    plain: Run
    off: Run
    turns: Conversation


def problems_of(runs: Runs) -> list[str]:
    """Returns a sentence for each promise that the hand-off broke; none if it kept them all."""
    on, plain, off, turns = runs
    found = _handoff_problems(on)
    if not on.saved:
        found.append("P's counters say that it saved nothing to the pool")
    found += [f"plain proxy: {problem}" for problem in _handoff_problems(plain)]
    found += turns.problems
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
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for heading in _HEADINGS:
        is_last = heading is _HEADINGS[-1]
        made.add_column(heading, justify="left" if is_last else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row.cells()))  # an answer may look like markup
    console = Console(width=_WIDE, color_system=None)
    with console.capture() as text:
        console.print(made)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def lines(runs: Runs) -> tuple[str, str, str]:
    """Returns a line for each run that the table does not show."""
    _, plain, off, turns = runs
    return (
        f"plain proxy: {_summary(plain)}",
        turns.line,
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
    requests = [[row.as_json() for row in run.rows] for run in (runs.on, runs.plain, runs.off)]
    return {
        "ok": not problems,
        "problems": list(problems),
        "requests": requests[0],
        "conversation": runs.turns.as_json(),
        "plain_proxy": {"requests": requests[1]},
        "control": {"pdstore_counters": runs.off.used, "requests": requests[2]},
    }
