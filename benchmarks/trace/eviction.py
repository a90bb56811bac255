"""Hits of a pool that is smaller than what is in use, with LRU and with Admission.

    git show 62ee8012:pdstore/worker/admission.py > before.py
    python -m benchmarks.trace.eviction FILE... --before before.py
        [--json benchmarks/results/trace_eviction.json]

FILE is a trace of the Mooncake release, as `benchmarks.trace` reads it. The other workloads are
made from seeds: users in a cycle of turns, each with a document that a new one replaces after six
questions. The pool is a model, one LRU list of blocks, in which a save's last blocks go first; the
policy is the product's, by the workload's own clock.

The last workloads are closed loops of users and an engine with a queue (`closed_loop`): means of
six seeds, from second 100 to 500. There a pool's size is a share of the users' own KV; those who
left need room as well. `--before` adds a column for an earlier `Admission`, with its rules.
"""

from __future__ import annotations

import argparse
import heapq
import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace.closed_loop import LIVE_TOKENS, BlockPool, ClosedLoop, Crowd, Policy, name_of
from benchmarks.trace.replay import Clock
from benchmarks.trace.requests import read_trace
from pdstore.store.admission import Admission

COLUMNS = [
    *("workload", "pool, of what is in use", "LRU, %"),
    *("before, %", "Admission, %", "saves refused, %"),
]
SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
TURNS = 6
SYSTEM_BLOCKS = 16
LOOP_SIZES = (1 / 4, 1 / 2, 3 / 4, 1.0, 1.07, 1.25, 1.5)
SEEDS = range(101, 107)
LOOP_S = (100.0, 500.0)


class Asked(NamedTuple):
    """A request: when, and the prefix-chained blocks of its prompt."""

    at_s: float
    blocks: Sequence[int]


PRODUCT = Policy(Admission, knows_queue=True)


def percentages(requests: Sequence[Asked], room: int, policy: Policy) -> tuple[float, float]:
    """Returns the percentages of blocks found and of saves refused."""
    clock, found, refused = Clock(), 0, 0
    admission = policy.admission and policy.admission(clock)
    pool = BlockPool(room, clock)
    for at_s, blocks in requests:
        clock.now_s = at_s
        num_found = pool.num_stored(blocks)
        found += num_found
        pool.use(blocks[:num_found])
        if admission is not None:
            names = [name_of(block) for block in blocks]
            admission.found(names[:num_found])
            admission.saved(names[num_found:])
            oldest = next(iter(pool.in_the_way(blocks[num_found:]).values()), None)
            if oldest is not None and not admission.admits(at_s - oldest.at):
                refused += 1
                continue
        pool.put(blocks[num_found:])
        if policy.knows_queue:  # as after a prompt's last save
            pool.use(blocks[: pool.num_stored(blocks)])
    num_blocks = sum(len(blocks) for _, blocks in requests)
    return 100 * found / num_blocks, 100 * refused / len(requests)


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
    made = {f"64 users, seed {seed}": (cycle(seed=seed), in_one) for seed in (1, 2)}
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
    parser.add_argument("--before", type=Path, metavar="FILE", help="an earlier admission.py")
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
    policies = [Policy(), PRODUCT]
    if given.before is not None:
        policies.insert(1, Policy(runpy.run_path(str(given.before))["Admission"]))
    report = Report("blocks found by a pool smaller than what is in use", COLUMNS)
    for name, (requests, num_blocks) in (workloads | made).items():
        for size in SIZES:
            room = max(1, int(num_blocks * size))
            add_row(report, name, size, [percentages(requests, room, each) for each in policies])
    for name, crowd in crowds().items():
        for size in LOOP_SIZES:
            add_row(report, name, size, [means(crowd, each, size) for each in policies])
    return report


def add_row(report: Report, name: str, size: float, found: Sequence[tuple[float, float]]) -> None:
    """Adds the percentages of LRU, of an earlier policy if it was asked for, and of the product."""
    before = round(found[1][0], 2) if len(found) == 3 else ""
    last, refused = found[-1]
    report.add(name, size, round(found[0][0], 2), before, round(last, 2), round(refused, 2))


def crowds() -> dict[str, Crowd]:
    """Returns users in closed loops, by the names of their workloads."""
    made = {}
    for users in (24, 48):
        for questions in (4, 2):
            name = f"{users} users leave after {questions} questions"
            made[f"{name}, in phase"] = Crowd(users, questions)
            made[f"{name}, mixed"] = Crowd(users, questions, is_mixed=True)
        name = f"{users} users leave after 4 questions on average"
        made[name] = Crowd(users, 4, is_geometric=True)
    return made


def means(crowd: Crowd, policy: Policy, size: float) -> tuple[float, float]:
    """Returns the mean percentages of tokens found and of saves refused in a closed loop."""
    room = int(size * crowd.num_users * LIVE_TOKENS)
    loops = [ClosedLoop(crowd, policy, room, seed) for seed in SEEDS]
    for loop in loops:
        loop.run(LOOP_S[0])
    counts = [loop.run(LOOP_S[1]) for loop in loops]
    found = sum(100 * each["loaded"] / each["asked"] for each in counts)
    refused = sum(100 * each["refused"] / each["saves"] for each in counts)
    return found / len(counts), refused / len(counts)


if __name__ == "__main__":
    main()
