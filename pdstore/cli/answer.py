"""Answer: the result of a command, as text for people and as one JSON document for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pydantic import ByteSize
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pdstore.cli.output import flushed_output, printable
from pdstore.format.keys import Json

_WIDE = 200


@dataclass
class Answer:
    """The result of a command.

    document: keys and values for `--json`. Each sentence in it is also in `shown`.
    shown: the parts of the output for people, in order.
    status: the exit status: 0, or 1 if what the command looked at is wrong.
    """

    document: Json
    shown: list[RenderableType] = field(default_factory=list)
    status: int = 0


def emit(answer: Answer, *, is_json: bool) -> None:
    """Prints an answer for people, or as one JSON document.

    Raises ConfigError if standard output cannot be written.
    """
    with flushed_output():
        if is_json:
            sys.stdout.write(json.dumps(answer.document, indent=1) + "\n")
            return
        console = Console(highlight=False)
        if not console.is_terminal:  # a pipe has no width at which to fold
            console.width = _WIDE
        for part in answer.shown:
            console.print(_as_it_is(part))


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> Table:
    """Returns a table without a frame. `>` begins the name of each column of numbers.

    Cells of type str are shown as they are, without markup. A `Text` may have a style.
    """
    has_names = any(columns)
    made = Table(
        box=box.SIMPLE_HEAD if has_names else None,
        show_header=has_names,
        pad_edge=False,
        show_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for name in columns:
        is_number = name.startswith(">")
        made.add_column(
            name.lstrip(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(_as_it_is, row))
    return made


def _as_it_is(part: RenderableType) -> RenderableType:
    """Stops rich from reading markup in a text, and a terminal from obeying control characters."""
    if isinstance(part, str):
        return Text(printable(part))
    if isinstance(part, Text):
        part.plain = printable(part.plain)  # as long as before, so its styles stay
    return part


def muted(text: str) -> Text:
    """Returns a line in a dim colour."""
    return Text(text, style="dim")


def size(num_bytes: float | None) -> str:
    """Returns bytes with a unit: `1.5GiB`; a dash for None."""
    return "-" if num_bytes is None else ByteSize(num_bytes).human_readable()


class Level(enum.Enum):
    """The weight of a finding. BAD: something fails. WARN: something works worse than it could."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"


_MARKS = {
    Level.OK: ("✓", "green"),
    Level.INFO: ("·", "dim"),
    Level.WARN: ("!", "yellow"),
    Level.BAD: ("✗", "red"),
}


class Finding(NamedTuple):
    """The result of a check. remedy: tells the user what to do; empty if nothing is to be done."""

    level: Level
    subject: str
    said: str
    remedy: str = ""


ok = partial(Finding, Level.OK)
info = partial(Finding, Level.INFO)
warn = partial(Finding, Level.WARN)
bad = partial(Finding, Level.BAD)


def answer_of(findings: Sequence[Finding]) -> Answer:
    """Returns findings as an answer; its status is 1 if one of them is BAD."""
    rows: list[list[RenderableType]] = []
    for finding in findings:
        mark, style = _MARKS[finding.level]
        message = Text(finding.said)
        if finding.remedy:
            message.append(f"\n→ {finding.remedy}", style="bold")
        rows.append([Text(mark, style=style), Text(finding.subject, style=style), message])
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    summary = f"{counts[Level.BAD]} wrong, {counts[Level.WARN]} to improve"
    document: list[Json] = [
        {"level": f.level.value, "subject": f.subject, "said": f.said, "remedy": f.remedy}
        for f in findings
    ]
    return Answer(
        {"findings": document, **{level.value: counts[level] for level in Level}},
        [table(["", "", ""], rows), muted(summary)],
        status=int(counts[Level.BAD] > 0),
    )
