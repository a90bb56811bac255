"""The commands of `python -m pdstore` and their flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdstore.cli.doctor import doctor
from pdstore.cli.native_report import native_report
from pdstore.cli.report import Report
from pdstore.errors import PDStoreError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    arguments: None takes the process's own.
    Returns 0; or 2, after one line on stderr, for an error that the user can mend.
    """
    asked = _parser().parse_args(arguments)
    try:
        report: Report = asked.run(asked)
    except PDStoreError as error:
        print(f"pdstore: {error}", file=sys.stderr)
        return 2
    print(report.text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdstore", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    native = commands.add_parser("native", help="build or find the native library")
    native.set_defaults(run=lambda asked: native_report())
    check = commands.add_parser("doctor", help="try the store: is it there, right, and how fast")
    check.add_argument("--store", metavar="URL", help="default: PDSTORE_STORE")
    check.set_defaults(run=lambda asked: doctor(asked.store))
    return parser
