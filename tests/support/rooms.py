"""Rooms: how much of each folder of pdstore/ the tests run. `make coverage` prints it.

It fails if a room is below MIN_PERCENT. `[tool.coverage.report]` in pyproject.toml lists what is
exempt.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent.parent
MIN_PERCENT = 90


def percents(data: coverage.Coverage) -> dict[str, tuple[float, list[str]]]:
    """Returns the share of each room's lines that ran, and the lines that did not, by file."""
    lines: dict[str, int] = defaultdict(int)
    missing: dict[str, int] = defaultdict(int)
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "pdstore").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if any(fnmatch(file, each) for each in data.get_option("report:omit") or []):
            continue
        _, statements, _, missed, where = data.analysis2(str(path))
        room = path.parent.relative_to(ROOT).as_posix()
        lines[room] += len(statements)
        missing[room] += len(missed)
        files[room] += [f"{file}: {where}"] if missed else []
    return {
        room: (100 * (1 - missing[room] / total), files[room])
        for room, total in lines.items()
        if total
    }


def main() -> None:
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    data.load()
    short = []
    for room, (percent, files) in percents(data).items():
        print(f"{percent:6.1f} %  {room}")
        short += files if percent < MIN_PERCENT else []
    sys.exit("\n".join([f"a room is below {MIN_PERCENT} %", *short]) if short else 0)


if __name__ == "__main__":
    main()
