"""Report: the numbers of one command, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdstore.cli.bench.stores import machine as machine
from pdstore.cli.bench.stores import seconds_of as seconds_of

Cell = float | int | str


@dataclass
class Report:
    """Rows of one benchmark. A number is printed short, and kept whole in the JSON."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        self.rows.append(list(cells))

    def text(self) -> str:
        cells = [[_shown(cell) for cell in row] for row in self.rows]
        widths = [
            max(len(row[i]) for row in [list(self.columns), *cells])
            for i in range(len(self.columns))
        ]
        lines = [self.title, _line(self.columns, widths), *(_line(row, widths) for row in cells)]
        return "\n".join([*lines, *self.notes])

    def json(self) -> str:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return json.dumps(
            {"title": self.title, "machine": machine(), "rows": rows, "notes": self.notes}, indent=1
        )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def _shown(cell: Cell) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if 1000 <= abs(cell) < 1e6 else f"{cell:.3g}"
