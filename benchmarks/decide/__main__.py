"""Compares `auto` with `always` and `never` over stores of many speeds and many requests at once.

    python -m benchmarks.decide --json benchmarks/results/decide.json

The decisions are the product's (`PromptTimes` learns as it does in an engine); the engine and the
store are simulated, with the prefill of an 8B model on one H200. A cell's first 256 requests, in
which `auto` learns, do not count for its p99. `first` is the first request of a fresh instance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product

from benchmarks.command import parser_of, run
from benchmarks.decide.machine import Machine, Store, Way
from benchmarks.report import Report

STORES = (
    Store("mooncake", 0.1, 0.01),
    Store("mooncake", 0.5, 0.01),
    Store("redis", 1.0, 0.005),
    Store("redis", 2.0, 0.005),
    Store("files", 4.0, 0.002),
    Store("files", 6.0, 0.002),
    Store("shm", 24.0, 0.001),
    Store("shm", 46.0, 0.001),
)
AT_ONCE = (1, 8, 32)
TOKENS = (1024, 4096, 8192, 32_768, 65_536)
WAYS: tuple[Way, ...] = ("always", "never", "auto")
COLUMNS = [
    *("store", "gb_s", "at_once", "arrive", "tokens"),
    *("load_p99_s", "compute_p99_s", "auto_p99_s", "auto_over_better"),
]
ARRIVE = ("in turn", "together")
AT_MOST = {"in turn": 1.05, "together": 1.05, "first": 1.2}
"""Times of the better way that `auto` may take."""
NUM_SEEDS, NUM_REQUESTS, NUM_LEARNING = 4, 384, 256


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("--stores", type=float, nargs="+", metavar="GB/S", help="only these")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--jitter", type=float, default=0.02, help="relative (%(default)s)")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    report = Report("seconds from a request to its first token, p99, simulated", COLUMNS)
    mixes = [*([tokens] for tokens in given.tokens), list(given.tokens)]
    for store in STORES:
        if not given.stores or store.gb_s in given.stores:
            for at_once, mix in product(given.at_once, mixes):
                tokens = mix[0] if len(mix) == 1 else "mixed"
                for arrive in ARRIVE[: min(2, at_once)]:
                    cell = (store, at_once, mix, arrive == "together", given.jitter)
                    took = [p99_of(way, *cell) for way in WAYS]
                    report.add(*store[:2], at_once, arrive, tokens, *took, took[2] / min(took[:2]))
            for tokens in given.tokens:
                took = [Machine(way, store, 0.0).run(1, [tokens], 1)[0] for way in WAYS]
                report.add(*store[:2], 1, "first", tokens, *took, took[2] / min(took[:2]))
    for arrive, most in AT_MOST.items():
        overs = [float(row[-1]) for row in report.rows if row[3] == arrive]
        above = sum(over > most for over in overs)
        worst = f"worst {max(overs, default=0):.3f}"
        report.notes.append(f"{arrive}: {above} of {len(overs)} cells above {most}, {worst}")
    return report


def p99_of(
    way: Way,
    store: Store,
    at_once: int,
    lengths: Sequence[int],
    in_bursts: bool,
    jitter: float,
    num_requests: int = NUM_REQUESTS,
) -> float:
    """Returns the p99 of one cell."""
    took: list[float] = []
    for seed in range(NUM_SEEDS):
        machine = Machine(way, store, jitter, seed)
        took += machine.run(at_once, lengths, num_requests, in_bursts, NUM_LEARNING)
    return percentile(took, 0.99)


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


if __name__ == "__main__":
    main()
