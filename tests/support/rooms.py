"""Rooms: how much of each folder of pdstore/ the tests run. `make coverage` prints it.

A room below its limit fails. `[tool.coverage]` in pyproject.toml lists what is exempt.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent.parent
MIN_PERCENT = 90
LOWER: dict[str, int] = {}
"""Limits of rooms that are not there yet. A change may raise a number, never lower it."""


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
        room: (100 * (1 - missing[room] / lines[room]), files[room])
        for room in lines
        if lines[room]
    }


def main() -> None:
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    data.load()
    is_short = False
    for room, (percent, files) in percents(data).items():
        limit = LOWER.get(room, MIN_PERCENT)
        print(f"{percent:6.1f} %  of {limit}  {room}")
        if percent < limit:
            is_short = True
            print(*files, sep="\n")
    sys.exit("a room is below its limit" if is_short else 0)


if __name__ == "__main__":
    main()
