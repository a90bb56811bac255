"""Replays a request trace through PrefixCacheManager and a store: private caches against one pool.

    python -m benchmarks.trace FILE [--json benchmarks/results/trace_NAME.json]

FILE is a trace of the Mooncake release: JSON lines with `timestamp`, `input_length`,
`output_length` and `hash_ids` (512 tokens each). Time is the trace's own, by a clock that jumps
from request to request; leases, eviction and matches are those of the product.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace.replay import Clock, Fleet, replay
from benchmarks.trace.requests import read_trace

COLUMNS = [
    *("instances", "caches", "tokens of room each", "publish lag, s"),
    *("tokens found, %", "saves refused"),
]


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--instances", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="room of each instance")
    parser.add_argument("--lags", type=float, nargs="*", default=[10.0, 60.0], metavar="S")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    clock, n, room = Clock(), given.instances, given.tokens
    rows: dict[tuple[int, str, int | str, float], Fleet] = {
        (n, "private", room, 0.0): Fleet(clock, n, room, is_shared=False, lag_s=0),
        (n, "one pool", room, 0.0): Fleet(clock, n, room, is_shared=True, lag_s=0),
        (n, "one pool", "no bound", 0.0): Fleet(clock, n, None, is_shared=True, lag_s=0),
    }
    for lag_s in given.lags:
        fleet = Fleet(clock, n, None, is_shared=True, lag_s=lag_s)
        rows[n, "one pool", "no bound", lag_s] = fleet
    requests = read_trace(given.file)
    count = replay(requests, list(rows.values()), clock)
    report = Report(
        f"{given.file.name}: {count} requests in {clock.now_s / 60:.0f} minutes", COLUMNS
    )
    for row, fleet in rows.items():
        report.add(*row, fleet.hits.percent, fleet.num_refused)
        fleet.close()
    return report


if __name__ == "__main__":
    main()
