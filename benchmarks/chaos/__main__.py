"""P and D under faults: kill -9, stops, bad links, full disks, lost directories, clocks that jump.

    make chaos SEED=7 MINUTES=10
    python -m benchmarks.chaos --seed 7 --minutes 10 --json chaos.json
    python -m benchmarks.chaos --seed 7 --round 12    # that round again
    make chaos ENGINE=vllm

The instances are mini engines, or vLLM on a CPU (`--engine vllm`), and every answer is compared
with one instance's, ids and probabilities. A third of the mini engines keep a state beside their
KV (`--engine states`: all), and a third quantize it, with scales in tensors of their own
(`--engine int8`: all). After each round everything that it took must be free again: requests,
blocks, slots, threads, fds, temporary files, keys. The faults of a round follow from the seed and
the round's number; where they hit the code does not. The exit status is 1 if anything was wrong.
"""

# Decision: docs/decisions/039-model-and-fuzz.md
from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos.campaign import Campaign, Shape
from benchmarks.chaos.engines import ENGINES
from benchmarks.chaos.pools import POOLS
from benchmarks.chaos.stacks import ALL_POOLS, STACKS
from benchmarks.report import machine

QUICK = Shape(round_s=2.0, rounds_per_stage=1, num_prompts=12)


def main() -> int:
    given = parse()
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    one_stack = random.Random(seed).choice(list(STACKS))
    pools = given.stores or ([*POOLS, one_stack] if given.quick else list(ALL_POOLS))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="pdstore-chaos-", ignore_cleanup_errors=True) as name:
        campaign = Campaign(
            Path(name),
            seed=seed,
            pools=pools,
            shape=QUICK if given.quick else Shape(),
            first_round=given.round or 0,
            say=say,
            engines=ENGINES[given.engine],
        )
        seconds = 0.0 if given.round is not None else 60 * given.minutes
        asyncio.run(campaign.run(seconds, len(pools) if given.quick else None))
        if campaign.tally.failures and given.keep_logs:
            Path(name, "logs").rename(given.keep_logs)
    result = {"seed": seed, "engine": given.engine, "minutes": given.minutes, "machine": machine()}
    result |= campaign.tally.result()
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    counts = {name: result[name] for name in ("wrong", "hang", "lost", "died", "leaks")}
    say(f"seed {seed}: {result['num_faults']} faults, {counts}")
    for failure in campaign.tally.failures:
        say(f"FAILED {failure}")
    return 1 if campaign.tally.failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, help="of all faults (default: a random one, printed)")
    add("--minutes", type=float, default=5.0, help="begin no round after this time (%(default)s)")
    add("--round", type=int, help="run this round alone")
    add("--quick", action="store_true", help="one short round on each store, for CI")
    add(
        "--stores", nargs="+", choices=list(ALL_POOLS), default=list(ALL_POOLS), help="default: all"
    )
    add("--engine", choices=list(ENGINES), default="mini", help="P's and D's (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the numbers there too")
    add("--keep-logs", type=Path, metavar="DIR", help="move the instances' logs there on failure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
