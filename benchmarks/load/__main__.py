"""Serves many users with each KV connector in turn: what they wait for, and what is served.

    python -m benchmarks.load --cpu                                   # a minute, the mini engine
    python -m benchmarks.load --engine vllm --workload turns --kinds plain simple shm --json FILE

Each kind is started alone, warmed up, and measured in windows; the order of the kinds is drawn.
With --beside all kinds are started at once, where the GPU and the host have the memory, and their
windows take turns, so that a slow minute of the machine meets them all. Rows are comparable within
one run. `shm@TREE` is a kind of pdstore from another checkout, which --trees names;
`shm+PDSTORE_WORKERS=4` has settings. Behind `--` come the engine's own options.

Kinds: `plain` has no pool, `ceiling` all KV in the GPU; `native` and `simple` are vLLM's own
offloads, `lmcache` its server; `shm`, `shm_decoded`, `shm_auto` and `files` are one instance with
pdstore; `relayed` and `concurrent` are P and D, `nixl` P and D without a pool; `two` are two
instances with one pool behind a router, and `two_affinity` behind one that sends a prompt where its
prefix went before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks.command import parser_of, run
from benchmarks.load.client import Answer, Client, Mode
from benchmarks.load.kinds import Fleet, kinds
from benchmarks.load.workloads import WORKLOADS, Plan, Sizes, Workload
from benchmarks.report import Cell, Report
from examples.demo.client import counters
from examples.demo.processes import ROOT, DemoError, Processes

COLUMNS = ["kind", "window", "rate", "answers/s", "tokens/s"]
TIMES = ["first turn p50, s", "p90", "p99", "later turn p50, s", "later p90", "later p99"]
TIMES += ["between mean, ms", "between p90", "between p99", "beyond P p50, ms", "beyond P p99"]
COUNTS = ["loaded tokens", "computed tokens", "preempted", "unanswered", "errors"]
_LOADED = ("vllm:external_prefix_cache_hits_total", "pdstore_tokens_total:loaded")
_COMPUTED = "vllm:prompt_tokens_by_source_total:local_compute"
_PREEMPTED = "vllm:num_preemptions_total"
_WARM_UP = 3


def main() -> None:
    given = _parse()
    workload = WORKLOADS[given.workload]
    if workload.needs_trace and given.trace is None:
        print(f"skipped: {given.workload} replays a trace, which --trace FILE names")
        return
    if given.json is not None and "load" not in given.json.name:
        sys.exit("--json: a name with `load` in it, so that results are found together")
    known = kinds(given.pool, workload.sizes, {})
    for name in given.kinds:
        what, _, tree = name.partition("+")[0].partition("@")
        if what not in known:
            sys.exit(f"{what}: no such kind; there are {', '.join(known)}")
        if tree and tree not in given.trees:
            sys.exit(f"--kinds {name}: --trees names no {tree}")
    run(lambda: measure(given, workload), given.json)


def measure(given: argparse.Namespace, workload: Workload) -> Report:
    """Runs every kind that is asked for, one after the other."""
    sizes = _sizes_of(given, workload)
    way = ", in turns" if given.beside else ""
    title = (
        f"{given.workload}, {given.engine}, seed {given.seed}: windows of {given.window:g} s{way}"
    )
    report = Report(title, [*COLUMNS, *TIMES, *COUNTS], notes=[str(sizes)])
    names = list(given.kinds)
    random.Random(given.order).shuffle(names)
    with tempfile.TemporaryDirectory(dir=given.pool, prefix="load-") as scratch:
        for together in [names] if given.beside else [[name] for name in names]:
            try:
                for name, row in _measured(given, workload, sizes, together, Path(scratch)):
                    report.add(name, *row)
                    _show(name, row)
            except DemoError as error:
                report.notes.append(f"{together}: {error}")
            if given.json is not None:
                given.json.write_text(report.json() + "\n")
    return report


def _measured(
    given: argparse.Namespace, workload: Workload, sizes: Sizes, names: list[str], scratch: Path
) -> Iterator[tuple[str, list[Cell]]]:
    """Starts the servers of some kinds, loads them in turns, and yields a row for each window.

    Every rate has prompts of its own, since the pools keep those of the rates before.
    """
    with contextlib.ExitStack() as started:
        processes = started.enter_context(Processes())
        how = given.engine, given.options, given.gpus
        fleet = Fleet(processes, scratch, sizes, *how, is_cpu=given.cpu)
        servers = []
        for name in names:
            pool = Path(started.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            what, *settings = name.split("+")
            what, _, tree = what.partition("@")
            root = Path(given.trees[tree]).resolve() if tree else ROOT
            kind = kinds(pool, sizes, dict(map(_pair, settings)))[what]
            urls, asked = fleet.start(what, kind, root, given.start_seconds)
            servers.append((name, kind.mode, urls, asked))
        for number, rate in enumerate(given.rates or [sizes.rate]):
            plan = Plan(replace(sizes, rate=rate), given.seed + number, given.trace)
            loads = [_Load(*each) for each in servers]
            asyncio.run(_take_turns(given, workload, plan, loads))
            processes.check()
            for load in loads:
                yield from ((load.name, row) for row in load.rows(given.window, rate))


@dataclass
class _Load:
    """The load on one kind. windows: for each when it began, and what the servers counted."""

    name: str
    mode: Mode
    urls: list[str]
    asked: list[str]
    windows: list[tuple[float, list[Cell]]] = field(default_factory=list)

    def begin(self, http: httpx.AsyncClient) -> Client:
        """Returns a client whose users wait until a window begins."""
        self.client = Client(http, self.asked, self.mode)
        return self.client

    def rows(self, window_s: float, rate: float) -> Iterator[list[Cell]]:
        """Yields a row for each window; the last one has the questions without an answer."""
        for number, (begin, counts) in enumerate(self.windows, 1):
            ended = [a for a in self.client.answers if 0 <= a.times[-1] - begin < window_s]
            tokens = sum(len(a.ids) for a in ended)
            own: list[Cell] = [number, rate, len(ended) / window_s, tokens / window_s]
            unanswered = self.client.num_open if number == len(self.windows) else 0
            yield [*own, *_times(ended), *counts, unanswered, len(self.client.errors)]
        for error in self.client.errors[:3]:
            print(error, file=sys.stderr)

    async def window(self, warm_s: float, seconds: float) -> None:
        """Lets the users ask for a while; returns when all that they asked is answered."""
        self.client.gate.set()
        await asyncio.sleep(warm_s)
        before, begin = [counters(url) for url in self.urls], self.client.now
        await asyncio.sleep(seconds)
        after = [counters(url) for url in self.urls]
        pairs = list(zip(before, after, strict=True))

        def more(*names: str) -> int:
            counts = (sum(new.get(n, 0) - old.get(n, 0) for old, new in pairs) for n in names)
            return int(max(counts))

        self.windows.append((begin, [more(*_LOADED), more(_COMPUTED), more(_PREEMPTED)]))

    async def pause(self) -> None:
        self.client.gate.clear()
        while self.client.num_open:
            await asyncio.sleep(0.05)


async def _take_turns(
    given: argparse.Namespace, workload: Workload, plan: Plan, loads: list[_Load]
) -> None:
    """Gives each kind its windows; in each round but one kind's users ask at a time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(trust_env=False, limits=limits) as http:
        for load in loads:
            client = load.begin(http)
            client.gate.set()
            for number in range(_WARM_UP):
                await client.ask(plan.tokens(plan.sizes.document, "warm-up", number), 4)
        running = [asyncio.create_task(workload.run(load.begin(http), plan)) for load in loads]
        for number, load in itertools.product(range(given.windows), loads):
            again_s = given.again if given.beside else 0.0
            await load.window(again_s if number else given.warm, given.window)
            if given.beside:
                await load.pause()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _show(name: str, row: Sequence[Cell]) -> None:
    shown = zip(COLUMNS[1:] + TIMES + COUNTS, row, strict=True)
    print(name, *(f"{what} {value:.3g};" for what, value in shown), file=sys.stderr, flush=True)


def _times(answers: Sequence[Answer]) -> list[Cell]:
    """Returns the columns TIMES."""
    first = [a.first_s for a in answers if a.turn == 0]
    later = [a.first_s for a in answers if a.turn > 0]
    gaps = [1e3 * gap for a in answers for gap in a.gaps]
    beyond = [1e3 * (a.first_s - a.prefill_s) for a in answers if a.prefill_s]
    mean = statistics.fmean(gaps) if gaps else 0.0
    between: list[Cell] = [mean, *_quantiles(gaps, 0.9, 0.99)]
    waits = [*_quantiles(first, 0.5, 0.9, 0.99), *_quantiles(later, 0.5, 0.9, 0.99)]
    return [*waits, *between, *_quantiles(beyond, 0.5, 0.99)]


def _quantiles(values: list[float], *shares: float) -> list[Cell]:
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1))] if ordered else 0.0 for share in shares]


def _sizes_of(given: argparse.Namespace, workload: Workload) -> Sizes:
    sizes = workload.sizes.shrunk() if given.cpu else workload.sizes
    changes = {"users": given.users, "pool_gib": given.pool_gib, "gpu": given.gpu}
    return replace(sizes, **{name: value for name, value in changes.items() if value is not None})


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=None)
    add = parser.add_argument
    add("--cpu", action="store_true", help="a tiny model and a sixteenth of the lengths")
    add("--engine", choices=("mini", "vllm"), help="default: mini with --cpu, else vllm")
    add("--workload", choices=tuple(WORKLOADS), default="turns")
    add("--kinds", nargs="+", default=["plain", "shm", "files"])
    add("--windows", type=int, default=3)
    add("--window", type=float, metavar="S", help="default: 60, with --cpu 5")
    add("--warm", type=float, metavar="S", help="before the first window; default: 15, 3")
    add("--beside", action="store_true", help="start all kinds at once; windows take turns")
    add("--again", type=float, metavar="S", default=8.0, help="before a later window of --beside")
    add("--rates", type=float, nargs="+", help="arrivals a second, one after the other")
    add("--gpus", nargs="+", default=[], help="of P and of D, as CUDA_VISIBLE_DEVICES names them")
    add("--users", type=int, help="who ask at once")
    add("--pool-gib", type=float, help="size of the host pool")
    add("--gpu", type=int, help="tokens of KV that fit into the engine's own cache")
    add("--trace", type=Path, metavar="FILE", help="of the Mooncake release")
    add("--trees", type=_pair, nargs="+", default=[], metavar="NAME=DIR", help="checkouts")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a directory in memory")
    add("--seed", type=int, default=1)
    add("--order", type=int, help="seed of the order of the kinds; default: another each time")
    add("--start-seconds", type=float, default=240)
    add("options", nargs="*", help="of the engine, behind --")
    given = parser.parse_args()
    given.engine = given.engine or ("mini" if given.cpu else "vllm")
    given.window = given.window or (5.0 if given.cpu else 60.0)
    given.warm = given.warm if given.warm is not None else (3.0 if given.cpu else 15.0)
    given.trees = dict(given.trees)
    return given


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    main()
