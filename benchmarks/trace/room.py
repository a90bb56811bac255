"""The smallest pool that finds a share of a trace's blocks, for a model.

    python -m benchmarks.trace.room FILE --model config.json [--hit-rate 0.3]

FILE is a trace of the Mooncake release, as `benchmarks.trace` reads it. Without a rate: the pools
for shares of the best one, that of a pool without end.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace.requests import TRACE_BLOCK, read_trace
from pdstore.errors import ConfigError
from pdstore.sizing import ModelShape

COLUMNS = ["of the best, %", "blocks found, %", "tokens", "GB"]


class ReuseDistances:
    """Reuse distances: for each repeated block, the number of other blocks used since its last use.

    A pool that drops the least recently used block hits exactly those whose distance is less than
    its size: one pass over the trace answers for every size.
    """

    def __init__(self, requests: Iterable[list[int]]) -> None:
        blocks = [block for request in requests for block in request]
        self.num_blocks = len(blocks)
        last: dict[int, int] = {}
        uses: list[int] = []  # the values of `last`, in order
        distances = []
        for now, block in enumerate(blocks):
            if block in last:
                place = bisect_left(uses, last[block])
                distances.append(len(uses) - place - 1)
                del uses[place]
            uses.append(now)
            last[block] = now
        self._sorted = sorted(distances)

    @property
    def best(self) -> float:
        """The hit rate of an unbounded pool."""
        return len(self._sorted) / max(1, self.num_blocks)

    def hit_rate(self, num_blocks: int) -> float:
        """Returns the hit rate of a pool with room for so many blocks."""
        return bisect_left(self._sorted, num_blocks) / max(1, self.num_blocks)

    def blocks_for(self, hit_rate: float) -> int | None:
        """Returns the smallest pool, in blocks, that reaches a hit rate; None if none does."""
        needed = -int(-hit_rate * self.num_blocks // 1)
        if needed > len(self._sorted):
            return None
        return self._sorted[needed - 1] + 1 if needed else 0


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--model", required=True, metavar="CONFIG", help="its config.json")
    parser.add_argument("--hit-rate", type=float, help="0 to 1")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    kv_bytes = ModelShape.of_config(given.model).kv_bytes()
    if given.hit_rate is not None and not 0 < given.hit_rate <= 1:
        raise ConfigError("--hit-rate is a share between 0 and 1")
    reuse = ReuseDistances(request.blocks for request in read_trace(given.file))
    rates = [reuse.best * share for share in (0.5, 0.8, 0.95, 1.0)]
    report = Report(f"{given.file.name}: a pool without end finds {reuse.best:.1%}", COLUMNS)
    for rate in rates if given.hit_rate is None else [given.hit_rate]:
        blocks = reuse.blocks_for(rate)
        tokens = None if blocks is None else blocks * TRACE_BLOCK
        room = ("none does", "") if tokens is None else (tokens, round(tokens * kv_bytes / 1e9, 2))
        report.add(round(100 * rate / reuse.best) if reuse.best else 0, round(100 * rate, 1), *room)
    return report


if __name__ == "__main__":
    main()
