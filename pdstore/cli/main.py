"""The commands of `python -m pdstore` and their flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pdstore.cli.bench_keys import bench_keys
from pdstore.cli.bench_start import bench_start
from pdstore.cli.bench_stores import bench_stores
from pdstore.cli.bench_swap import bench_swap
from pdstore.cli.doctor import doctor
from pdstore.cli.native_report import native_report
from pdstore.cli.report import Report
from pdstore.errors import PDStoreError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when it went well, 2 and a line when the user has something to mend."""
    asked = _parser().parse_args(arguments)
    try:
        report: Report = asked.run(asked)
    except PDStoreError as error:
        print(f"pdstore: {error}", file=sys.stderr)
        return 2
    print(report.text())
    if asked.json is not None:
        asked.json.write_text(report.json())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdstore", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    native = commands.add_parser("native", help="build or find the native library")
    native.set_defaults(run=lambda asked: native_report(), json=None)
    check = commands.add_parser("doctor", help="try the store: is it there, right, and how fast")
    check.add_argument("--store", metavar="URL", help="default: PDSTORE_STORE")
    check.set_defaults(run=lambda asked: doctor(asked.store), json=None)
    bench = commands.add_parser("bench", help="measure, side by side in one run")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    keys = kinds.add_parser("keys", help="hash a long prompt into block keys")
    keys.set_defaults(run=lambda asked: bench_keys(rounds=asked.rounds))

    stores = kinds.add_parser("stores", help="put and get against the store's raw calls")
    stores.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="a store to measure, again for more (default: a new file store in --directory)",
    )
    stores.add_argument(
        "--directory",
        type=Path,
        default=Path("/dev/shm"),
        help="where the default file store is made, and removed again (default: %(default)s)",
    )
    stores.set_defaults(
        run=lambda asked: bench_stores(asked.store or [], asked.directory, rounds=asked.rounds)
    )
    swap = kinds.add_parser("swap", help="block copies between a GPU and pinned slots")
    swap.add_argument("--alone", action="store_true", help="without a model beside them")
    swap.add_argument("--shape", action="append", help="one of the shapes' names, again for more")
    swap.set_defaults(
        run=lambda asked: bench_swap(asked.rounds, beside=not asked.alone, names=asked.shape or [])
    )

    start = kinds.add_parser("start", help="how long staging takes to be ready, and who waits")
    start.set_defaults(run=lambda asked: bench_start(asked.rounds))
    for kind in (keys, stores, swap, start):
        kind.add_argument("--rounds", type=_count, default=15, help="repetitions (%(default)s)")
        kind.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
