"""Compares `auto` with `always` and `never` over stores of many speeds and many requests at once.

    python -m benchmarks.decide --json benchmarks/results/decide.json

The decisions are the product's (`PromptTimes` learns as it does in an engine); the engine and the
store are simulated, with the prefill of an 8B model on one H200. All prompts are stored whole.
Requests come in waves; the first waves of a cell, in which nothing is known yet, do not count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from benchmarks.command import parser_of, run
from benchmarks.decide.machine import Machine
from benchmarks.report import Report
from pdstore.scheduler.break_even import Mode

STORES_GB_S = (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0)
AT_ONCE = (1, 4, 16, 64)
TOKENS = (1024, 8192, 32_768)
COLUMNS = ["store_gb_s", "at_once", "tokens", "load_p99_s", "compute_p99_s", "auto_p99_s"]
NUM_REQUESTS = 512
LEARNING_WAVES = 12
REST_S = 0.05


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("--stores", type=float, nargs="+", default=STORES_GB_S, metavar="GB/S")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--jitter", type=float, default=0.02, help="relative (%(default)s)")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    report = Report("seconds from a request to its prompt's KV, p99, in simulated time", COLUMNS)
    for store_gb_s in given.stores:
        for at_once in given.at_once:
            for tokens in given.tokens:
                cell = (store_gb_s, at_once, tokens)
                modes: tuple[Mode, ...] = ("always", "never", "auto")
                report.add(*cell, *(p99_of(mode, *cell, given.jitter) for mode in modes))
    worst = max(_over(row) for row in report.rows)
    report.notes.append(f"auto over the better one: at most {worst:.3f} times")
    return report


def p99_of(
    mode: Mode,
    store_gb_s: float,
    at_once: int,
    tokens: int,
    jitter: float,
    num_requests: int = NUM_REQUESTS,
) -> float:
    """Returns the p99 of one cell; each policy meets the same jitter."""
    machine = Machine(mode, store_gb_s, jitter, seed=1)
    took: list[float] = []
    for number in range(LEARNING_WAVES + math.ceil(num_requests / at_once)):
        times = machine.wave(at_once, tokens)
        machine.rest(REST_S)
        if number >= LEARNING_WAVES:
            took += times
    return percentile(took, 0.99)


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _over(row: Sequence[float | int | str]) -> float:
    load, compute, auto = (float(cell) for cell in row[3:])
    return auto / min(load, compute)


if __name__ == "__main__":
    main()
