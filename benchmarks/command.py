"""The flags that all benchmarks share, and the printing of their reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report
from pdstore.errors import PDStoreError


def parser_of(description: str | None, rounds: int | None = 15) -> argparse.ArgumentParser:
    """Returns a parser with `--json` and `--rounds`.

    description: the module's docstring. rounds: the default; None for no such option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if rounds is not None:
        parser.add_argument("--rounds", type=_count, default=rounds, help="times (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def run(measure: Callable[[], Report], json: Path | None) -> None:
    """Prints a report and writes it to `json`.

    An error that a user can mend ends the program with one line; a `json` that cannot be written
    does so before anything is measured. Ctrl-C ends the program with exit status 130.
    """
    try:
        if json is not None:
            json.open("a").close()
        report = measure()
        print(report.text())
        if json is not None:
            json.write_text(report.json() + "\n")
    except (PDStoreError, OSError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
