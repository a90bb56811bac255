"""Hits of two tiers that together are smaller than what is in use, with LRU and with Admission.

    python -m benchmarks.trace.tiers FILE... [--json benchmarks/results/trace_tiers.json]

FILE is a trace of the Mooncake release, as `benchmarks.trace` reads it; users who ask in turn come
from `benchmarks.trace.eviction`. Each tier is a model, an LRU list of blocks; `Admission` is the
product's, by the workload's own clock. Sizes are shares of what is in use: of a trace all blocks,
of users those that they have at a time.

Policies: `LRU` saves and copies everything. `last` does not make a save for which the lower tier
would evict blocks that are worth more. `product` also leaves below what was found there, if the
first tier would evict blocks that are worth more, and counts a prompt's last save as a use of the
whole prompt in both tiers. `unused below` counts it in the first tier alone. `hand-offs` is that
where another instance waits for each save: all enter the first tier, and `last` decides what is
copied down.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace import eviction
from benchmarks.trace.closed_loop import BlockPool, name_of
from benchmarks.trace.eviction import Asked, cycle, in_use
from benchmarks.trace.replay import Clock
from benchmarks.trace.requests import read_trace
from pdstore.store.admission import Admission

COLUMNS = [
    *("workload", "first tier", "lower tier", "policy", "found, %", "in the first, %", "below, %"),
    *("written down, %", "copied up, %", "saves refused, %"),
]
SIZES = [
    *((1 / 16, 1 / 4), (1 / 16, 1 / 2), (1 / 8, 1 / 4), (1 / 8, 1 / 2), (1 / 8, 3 / 4)),
    *((1 / 4, 1 / 4), (1 / 4, 1 / 2), (1 / 4, 3 / 4), (1 / 4, 1.0)),
]


@dataclass(frozen=True)
class Policy:
    """The rules of the tiers. is_last, is_up: the admission decides there, else all is copied.

    is_awaited: another instance waits for every save. is_used: a save uses its prompt below, too.
    """

    is_last: bool = False
    is_up: bool = False
    is_awaited: bool = False
    is_used: bool = False


POLICIES = {
    "LRU": Policy(),
    "last": Policy(is_last=True),
    "product": Policy(is_last=True, is_up=True, is_used=True),
    "unused below": Policy(is_last=True, is_up=True),
    "hand-offs": Policy(is_last=True, is_up=True, is_awaited=True),
}


class TwoTiers:
    """A first and a lower tier of so many blocks, which requests ask in turn.

    A block that is found in the first tier does not count as used in the lower one, and the blocks
    of a copy count as used in the order in which they are written. counts: blocks
    "asked", found "above" and "below", written "down" and copied "up"; "saves" and "refused" ones.
    """

    def __init__(self, first: int, lower: int, policy: Policy) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = Clock()
        self._policy = policy
        self._first = BlockPool(first, self._clock)
        self._lower = BlockPool(lower, self._clock)
        self._admission = Admission(self._clock)

    def ask(self, request: Asked) -> None:
        """Loads what is stored of a prompt, and saves the rest."""
        self._clock.now_s, blocks = request
        above = [block for block in blocks if block in self._first]
        stored = {*above, *(block for block in blocks if block in self._lower)}
        num_found = next((i for i, b in enumerate(blocks) if b not in stored), len(blocks))
        names = [name_of(block) for block in blocks]
        self._admission.found(names[:num_found])
        self._load(blocks[:num_found])
        self._admission.saved(names[num_found:])
        if self._policy.is_used:
            self._lower.use([block for block in blocks if block in self._lower])
        self._save(blocks[num_found:])
        self._first.use([block for block in blocks if block in self._first])
        self.counts["asked"] += len(blocks)

    def _load(self, blocks: Sequence[int]) -> None:
        above = [block for block in blocks if block in self._first]
        below = [block for block in blocks if block not in self._first]
        self._first.use(above)
        self._lower.use(below)
        self.counts += Counter(above=len(above), below=len(below))
        if self._policy.is_up and not self._admits(self._first, below):
            return
        self._first.put(below)
        self.counts["up"] += sum(block in self._first for block in below)

    def _save(self, blocks: Sequence[int]) -> None:
        self.counts["saves"] += 1
        goes_down = not self._policy.is_last or self._admits(self._lower, blocks)
        self.counts["refused"] += not goes_down
        if goes_down or self._policy.is_awaited:
            self._first.put(blocks)
        if goes_down:
            copied = [b for b in blocks if b in self._first and b not in self._lower]
            self._lower.put(copied)
            stored = [block for block in copied if block in self._lower]
            self._lower.use(stored[::-1])
            self.counts["down"] += len(stored)

    def _admits(self, tier: BlockPool, blocks: Sequence[int]) -> bool:
        """True if the blocks have room in a tier, or may evict its oldest."""
        oldest = next(iter(tier.in_the_way(blocks).values()), None)
        return oldest is None or self._admission.admits(self._clock() - oldest.at)


def played(
    requests: Sequence[Asked], num_blocks: int, sizes: tuple[float, float], policy: Policy
) -> Counter[str]:
    """Returns what happened to a workload in tiers of these shares of a number of blocks."""
    first, lower = (max(1, int(num_blocks * size)) for size in sizes)
    tiers = TwoTiers(first, lower, policy)
    for request in requests:
        tiers.ask(request)
    return tiers.counts


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--users", type=int, default=64, help="who ask in turn (%(default)s)")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    workloads = {}
    for seed in (1, 2):
        requests = cycle(given.users, seed=seed)
        name = f"{given.users} users, seed {seed}"
        workloads[name] = requests, in_use(given.users, requests)
    for file in given.files:
        requests = [Asked(request.at_s, request.blocks) for request in read_trace(file)]
        workloads[file.stem] = requests, len({b for _, blocks in requests for b in blocks})
    report = Report("blocks found by two tiers smaller than what is in use", COLUMNS)
    for name, (requests, num_blocks) in workloads.items():
        for first in sorted({first for first, _ in SIZES}):
            one = eviction.percentages(requests, int(num_blocks * first), eviction.PRODUCT)
            found, refused = (round(value, 1) for value in one)
            report.add(name, first, 0, "product", found, found, 0, 0, 0, refused)
        for sizes in SIZES:
            for policy, rules in POLICIES.items():
                counts = played(requests, num_blocks, sizes, rules)
                report.add(name, *sizes, policy, *percentages(counts))
    return report


def percentages(counts: Counter[str]) -> list[float]:
    """Returns the columns from `found` on."""
    asked, found = counts["asked"], counts["above"] + counts["below"]
    shares = [counts[of] / asked for of in ("above", "below", "down", "up")]
    shares = [found / asked, *shares, counts["refused"] / max(1, counts["saves"])]
    return [round(100 * share, 1) for share in shares]


if __name__ == "__main__":
    main()
