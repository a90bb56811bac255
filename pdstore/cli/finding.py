"""Finding: the result of one check of the doctor, its remedy, and how both are shown."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, muted, table
from pdstore.format.namespace import Json


class Level(enum.Enum):
    """The weight of a finding: BAD does not work, WARN works worse than it could."""

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
    """A finding. remedy: what to do, in the imperative; empty where nothing is to be done."""

    level: Level
    subject: str
    said: str
    remedy: str = ""


def ok(subject: str, said: str) -> Finding:
    return Finding(Level.OK, subject, said)


def info(subject: str, said: str) -> Finding:
    return Finding(Level.INFO, subject, said)


def warn(subject: str, said: str, remedy: str) -> Finding:
    return Finding(Level.WARN, subject, said, remedy)


def bad(subject: str, said: str, remedy: str) -> Finding:
    return Finding(Level.BAD, subject, said, remedy)


def answer_of(findings: Sequence[Finding]) -> Answer:
    """Shows findings. Status 1 if something does not work."""
    rows: list[list[RenderableType]] = []
    for finding in findings:
        mark, style = _MARKS[finding.level]
        said = Text(finding.said)
        if finding.remedy:
            said.append(f"\n→ {finding.remedy}", style="bold")
        rows.append([Text(mark, style=style), Text(finding.subject, style=style), said])
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
