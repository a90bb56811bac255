"""Hits of a pool that is smaller than what is in use: LRU, a fixed time of rest, and Admission.

    python -m benchmarks.trace.eviction FILE... [--json benchmarks/results/trace_eviction.json]

FILE is a trace of the Mooncake release, as `benchmarks.trace` reads it. The other workloads are
made from seeds: users in a cycle of turns, each with a document that a new one replaces after six
questions. The pool is a model, one LRU list of blocks, in which a save's last blocks go first; the
policy is the product's, by the workload's own clock. "A fixed time" refuses a block while the
oldest one was used within so many requests: the best of several, known afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace.replay import Clock
from benchmarks.trace.requests import read_trace
from pdstore.worker.admission import Admission

COLUMNS = [
    *("workload", "pool, of what is in use", "LRU, %", "best fixed time, %", "requests of it"),
    *("Admission, %", "saves refused, %"),
]
SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
FIXED = (16, 32, 64, 96, 128, 192, 256)
TURNS = 6
SYSTEM_BLOCKS = 16


class Asked(NamedTuple):
    """A request: when, and the prefix-chained blocks of its prompt."""

    at_s: float
    blocks: Sequence[int]


class Use(NamedTuple):
    """The last use of a block: when, and in which request."""

    at_s: float
    request: int


Refuses = Callable[[Use, Use], bool]
"""Decides by the oldest block's last use, and the present one, whether a save is refused."""


@cache
def name_of(block: int) -> bytes:
    """Returns the prefix hash that stands for a block."""
    return hashlib.blake2b(str(block).encode(), digest_size=16).digest()


class ModelPool:
    """An LRU list of blocks.

    room: blocks. at_once: blocks of a save that are refused or evict others together; None: all.
    """

    def __init__(self, room: int, refuses: Refuses, at_once: int | None = 1) -> None:
        self._room, self._refuses, self._at_once = room, refuses, at_once
        self._used: OrderedDict[int, Use] = OrderedDict()
        self.num_refused = 0

    def find(self, blocks: Sequence[int], now: Use) -> int:
        """Returns how many of the first blocks are there, which are used."""
        found = next((i for i, b in enumerate(blocks) if b not in self._used), len(blocks))
        self._touch(blocks[:found], now)
        return found

    def save(self, blocks: Sequence[int], now: Use) -> None:
        """Puts what is admitted of a chain; the oldest blocks go for it."""
        step = self._at_once or max(1, len(blocks))
        for start in range(0, len(blocks), step):
            share = blocks[start : start + step]
            absent = [block for block in share if block not in self._used]
            missing = len(self._used) + len(absent) - self._room
            if absent and missing > 0 and self._refuses(next(iter(self._used.values())), now):
                self.num_refused += 1
                return
            for _ in range(min(missing, len(self._used))):
                self._used.popitem(last=False)
            self._touch(share[: self._room], now)

    def _touch(self, blocks: Sequence[int], now: Use) -> None:
        for block in reversed(blocks):
            self._used[block] = now
            self._used.move_to_end(block)


def share_found(requests: Sequence[Asked], room: int, refuses: Refuses) -> float:
    """Returns the percentage of the blocks that a pool finds which saves block by block."""
    pool, found = ModelPool(room, refuses), 0
    for number, (at_s, blocks) in enumerate(requests):
        now = Use(at_s, number)
        num_found = pool.find(blocks, now)
        pool.save(blocks[num_found:], now)
        found += num_found
    return 100 * found / sum(len(blocks) for _, blocks in requests)


def share_admitted(requests: Sequence[Asked], room: int) -> tuple[float, float]:
    """Returns the percentages of blocks found and of saves refused with the product's policy."""
    clock, found = Clock(), 0
    admission = Admission(clock)
    pool = ModelPool(room, lambda old, now: not admission.admits(now.at_s - old.at_s), None)
    for number, (at_s, blocks) in enumerate(requests):
        now, clock.now_s = Use(at_s, number), at_s
        num_found = pool.find(blocks, now)
        names = [name_of(block) for block in blocks]
        admission.found(names[:num_found])
        admission.saved(names[num_found:])
        pool.save(blocks[num_found:], now)
        found += num_found
    num_blocks = sum(len(blocks) for _, blocks in requests)
    return 100 * found / num_blocks, 100 * pool.num_refused / len(requests)


def cycle(
    users: int = 64, *, seed: int = 1, turns: int = 40, think_s: tuple[float, float] = (30, 55)
) -> list[Asked]:
    """Returns the requests of users who ask in turn, in order; `turns`: of each user in all."""
    chance, number = random.Random(seed), seed << 32
    system = range(number - SYSTEM_BLOCKS, number)
    due = [(chance.uniform(0, think_s[0]), user) for user in range(users)]
    heapq.heapify(due)
    chats: dict[int, list[int]] = {}
    asked: dict[int, int] = dict.fromkeys(range(users), 0)
    requests = []
    for _ in range(users * turns):
        at_s, user = heapq.heappop(due)
        is_new = asked[user] % TURNS == 0
        count = chance.randrange(4, 10) + is_new * max(8, int(chance.lognormvariate(4.4, 0.5)))
        before = [*system] if is_new else chats[user]
        chats[user] = [*before, *range(number, number + count)]
        number, asked[user] = number + count, asked[user] + 1
        requests.append(Asked(at_s, chats[user]))
        heapq.heappush(due, (at_s + chance.uniform(*think_s), user))
    return requests


def once(num_requests: int, until_s: float) -> list[Asked]:
    """Returns prompts of 60 blocks each that nobody asks again, at an even rate."""
    first = -(1 << 40)
    starts = range(first, first + 60 * num_requests, 60)
    return [
        Asked(until_s * i / num_requests, range(start, start + 60))
        for i, start in enumerate(starts)
    ]


def behind(first: Sequence[Asked], second: Sequence[Asked]) -> list[Asked]:
    """Returns the requests of one workload, and then those of another."""
    return [*first, *(Asked(first[-1].at_s + at_s, blocks) for at_s, blocks in second)]


def in_use(users: int, requests: Sequence[Asked]) -> int:
    """Returns the blocks that the users of a cycle have at a time."""
    return users * sum(len(blocks) for _, blocks in requests) // len(requests)


def made_workloads() -> dict[str, tuple[list[Asked], int]]:
    """Returns workloads by their names, and the blocks that each has in use at a time."""
    one = cycle()
    in_one = in_use(64, one)
    made = {f"64 users, seed {seed}": (cycle(seed=seed), in_one) for seed in (1, 2, 3, 4)}
    for users in (32, 128):
        of_others = cycle(users)
        made[f"{users} users"] = of_others, in_use(users, of_others)
    made["64 users, each asks twice at once"] = (
        sorted([*one, *(Asked(at_s + 0.05, blocks) for at_s, blocks in one)]),
        in_one,
    )
    made["64 users, 10 to 200 s between turns"] = cycle(think_s=(10, 200)), in_one
    slower = cycle(seed=9, think_s=(90, 160))
    made["64 users, then others three times slower"] = behind(one, slower), in_one
    one_time = once(len(one), one[-1].at_s)
    made["64 users among as many one-time prompts"] = sorted([*one, *one_time]), in_one
    made["64 users, one-time prompts, 64 others"] = (
        behind(behind(one, one_time[:1200]), cycle(seed=9)),
        in_one,
    )
    return made


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    workloads = {}
    for file in given.files:
        requests = [Asked(request.at_s, request.blocks) for request in read_trace(file)]
        num_blocks = len({block for _, blocks in requests for block in blocks})
        workloads[file.stem] = requests, num_blocks
    made = made_workloads()
    for file in given.files[-1:]:
        first, room = made["64 users, seed 1"]
        made[f"64 users, then {file.stem}"] = behind(first, workloads[file.stem][0]), room
    report = Report("blocks found by a pool smaller than what is in use", COLUMNS)
    for name, (requests, num_blocks) in (workloads | made).items():
        for size in SIZES:
            add_row(report, name, requests, size, max(1, int(num_blocks * size)))
    return report


def add_row(report: Report, name: str, requests: list[Asked], size: float, room: int) -> None:
    lru = share_found(requests, room, within(0))
    fixed = {count: share_found(requests, room, within(count)) for count in FIXED}
    best = max(fixed, key=fixed.__getitem__)
    report.add(name, size, lru, fixed[best], best, *share_admitted(requests, room))


def within(num_requests: int) -> Refuses:
    """Refuses while the oldest block was used within so many requests; 0: never."""
    return lambda old, now: now.request - old.request < num_requests


if __name__ == "__main__":
    main()
