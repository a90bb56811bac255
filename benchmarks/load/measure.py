"""Starts each kind of servers, loads it in windows, and reports what its users saw."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks.load.client import Answer, Client, Mode
from benchmarks.load.kinds import Disk, Fleet, kinds
from benchmarks.load.workloads import WORKLOADS, Plan, Sizes
from benchmarks.report import Cell, Report
from examples.demo.client import counters
from examples.demo.processes import ROOT, DemoError, Processes

COLUMNS = ["kind", "workload", "window", "rate", "answers/s", "tokens/s"]
TIMES = ["first turn p50, s", "p90", "p99", "later turn p50, s", "later p90", "later p99"]
TIMES += ["between mean, ms", "between p90", "between p99", "beyond P p50, ms", "beyond P p99"]
_COUNTED = {
    "found tokens": "vllm:external_prefix_cache_hits_total",
    "promised": "pdstore_tokens_total:promised",
    "loaded": "pdstore_tokens_total:loaded",
    "lost": "pdstore_tokens_total:lost",
    "loads": "pdstore_jobs_total:load:",
    "loads lost": "pdstore_jobs_total:load:lost",
    "saves": "pdstore_jobs_total:save:",
    "not admitted": "pdstore_jobs_total:save:not_admitted",
    "computed tokens": "vllm:prompt_tokens_by_source_total:local_compute",
    "preempted": "vllm:num_preemptions_total",
}
"""The counters of each column, by how their names begin. An older pdstore lacks some."""
_OF_TIERS = ("pdstore_tier_copies_total", "pdstore_tier_tokens_total", "pdstore_tier_bytes_total")
"""How the names begin of what is counted for one tier alone."""
COUNTS = [*_COUNTED, "unanswered", "errors", "by tier"]
OPTIONS = ("users", "turns", "document", "pool_gib", "gpu", "vocabulary")
"""Sizes that the command line may change."""
_WARM_UP = 3


def _report_of(given: argparse.Namespace) -> Report:
    way = ", in turns" if given.beside or given.anew else ""
    way += ", servers started anew for each" if given.anew else ""
    what = f"{', '.join(given.workload)}, {given.engine}, {given.model}, seed {given.seed}"
    notes = [f"{name}: {sizes}" for name, sizes in sizes_of(given).items()]
    title = f"{what}: windows of {given.window:g} s{way}"
    return Report(title, [*COLUMNS, *TIMES, *COUNTS], notes=notes)


def _write(given: argparse.Namespace, report: Report) -> None:
    if given.json is not None:
        given.json.write_text(report.json() + "\n")


def measure(given: argparse.Namespace) -> Report:
    """Runs every kind that is asked for, one after the other."""
    report, names = _report_of(given), list(given.kinds)
    random.Random(given.order).shuffle(names)
    groups = [names] if given.beside else [[name] for name in names]
    numbers = range(given.windows)
    rounds = [numbers[i : i + 1] for i in numbers] if given.anew else [numbers]
    with tempfile.TemporaryDirectory(dir=given.pool, prefix="load-") as scratch:
        for windows, together in itertools.product(rounds, groups):
            try:
                _measure(given, together, windows, Path(scratch), report)
            except (DemoError, httpx.HTTPError) as error:
                report.notes.append(f"{together}: {error}")
            _write(given, report)
    return report


def _measure(
    given: argparse.Namespace, names: list[str], windows: range, scratch: Path, report: Report
) -> None:
    """Starts the servers of some kinds, loads them in turns, and reports a row for each window.

    Every workload and rate has prompts of its own, since the pools keep those of the ones before;
    so have the windows of servers that are started anew.
    """
    sizes, disk = sizes_of(given), disk_of(given)
    engine = replace(sizes[given.workload[0]], longest=max(each.longest for each in sizes.values()))
    cells = [
        (what, rate)
        for what in given.workload
        for rate in (WORKLOADS[what].is_open and given.rates) or [sizes[what].rate]
    ]
    with contextlib.ExitStack() as pools, Processes() as processes:
        how = given.engine, given.options, given.gpus
        fleet = Fleet(processes, scratch, engine, *how, is_cpu=given.cpu, model=given.model)
        started = []
        for name in names:
            pool = Path(pools.enter_context(_directory(scratch)))
            below = Path(pools.enter_context(_directory(disk.directory)))
            what, *settings = name.split("+")
            what, _, tree = what.partition("@")
            root = Path(given.trees[tree]).resolve() if tree else ROOT
            own = dict(setting.split("=", 1) for setting in settings)
            kind = kinds(pool, engine, own, disk._replace(directory=below))[what]
            label = f"{name}-{windows[0] + 1}"
            started.append((name, kind, fleet.start(label, kind, root)))
        servers = [
            (name, kind.mode, urls, fleet.asked(kind, urls, given.start_seconds))
            for name, kind, urls in started
        ]
        for number, (what, rate) in enumerate(cells):
            seed = given.seed + number + windows[0] * len(cells)
            plan = Plan(replace(sizes[what], rate=rate), seed, given.trace)
            loads = [_Load(*each) for each in servers]
            asyncio.run(_take_turns(given, what, plan, loads, windows, report))
            processes.check()


@dataclass
class _Load:
    """The load on one kind."""

    name: str
    mode: Mode
    urls: list[str]
    asked: list[str]

    def begin(self, http: httpx.AsyncClient) -> Client:
        """Returns a client whose users wait until a window begins."""
        self.client = Client(http, self.asked, self.mode)
        return self.client

    async def window(self, warm_s: float, seconds: float) -> list[Cell]:
        """Lets the users ask for a while; returns the columns from `answers/s` on."""
        self.client.gate.set()
        await asyncio.sleep(warm_s)
        before, begin = [counters(url) for url in self.urls], self.client.now
        await asyncio.sleep(seconds)
        after = [counters(url) for url in self.urls]
        pairs = list(zip(before, after, strict=True))

        def more(begin: str) -> int:
            names = {n for _, new in pairs for n in new if n.startswith(begin)}
            return int(sum(new.get(n, 0) - old.get(n, 0) for old, new in pairs for n in names))

        counts = [more(each) for each in _COUNTED.values()]
        of_tiers = {n: more(n) for _, new in pairs for n in new if n.startswith(_OF_TIERS)}
        ended = [a for a in self.client.answers if 0 <= a.times[-1] - begin < seconds]
        times = [time - begin for answer in self.client.begun for time in answer.times]
        tokens = sum(0 <= time < seconds for time in times)
        rates: list[Cell] = [len(ended) / seconds, tokens / seconds]
        errors = len(self.client.errors)
        by_tier = ", ".join(f"{n} {count}" for n, count in sorted(of_tiers.items()) if count)
        return [*rates, *_times(ended), *counts, self.client.num_open, errors, by_tier]

    async def pause(self) -> None:
        self.client.gate.clear()
        while self.client.num_open:
            await asyncio.sleep(0.05)


async def _take_turns(
    given: argparse.Namespace,
    what: str,
    plan: Plan,
    loads: list[_Load],
    windows: range,
    report: Report,
) -> None:
    """Gives each kind its windows, in turns; adds each to the report when it ends."""
    # Shorter than the servers' own 5 s: a request must not meet the end of its connection.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(trust_env=False, limits=limits) as http:
        for load in loads:
            client = load.begin(http)
            client.gate.set()
            for number in range(_WARM_UP):
                await client.ask(plan.tokens(plan.sizes.document, "warm-up", number), 4)
        run = WORKLOADS[what].run
        running = [asyncio.create_task(run(load.begin(http), plan)) for load in loads]
        for number, load in itertools.product(windows, loads):
            again_s = given.again if given.beside else 0.0
            warm_s = given.warm if number == windows[0] else again_s
            own = await load.window(warm_s, given.window)
            row = [load.name, what, number + 1, plan.sizes.rate, *own]
            report.add(*row)
            _show(row)
            _write(given, report)
            if given.beside:
                await load.pause()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for error in [error for load in loads for error in load.client.errors[:3]]:
            print(error, file=sys.stderr)


def _show(row: Sequence[Cell]) -> None:
    name, workload, *numbers = row
    shown = zip([*COLUMNS[2:], *TIMES, *COUNTS], numbers, strict=True)
    texts = (
        f"{what} {value if isinstance(value, str) else f'{value:.3g}'};" for what, value in shown
    )
    print(name, workload, *texts, file=sys.stderr, flush=True)


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


def sizes_of(given: argparse.Namespace) -> dict[str, Sizes]:
    """Returns the sizes of each workload that is asked for, by its name."""
    options = {name: getattr(given, name) for name in OPTIONS}
    changes = {name: value for name, value in options.items() if value is not None}
    sizes = {what: WORKLOADS[what].sizes for what in given.workload}
    if given.cpu:
        sizes = {what: each.shrunk() for what, each in sizes.items()}
    return {what: replace(each, **changes) for what, each in sizes.items()}


def disk_of(given: argparse.Namespace) -> Disk:
    """Returns the disk that is asked for, on which each kind has a directory of its own."""
    gib = given.disk_gib or 4 * min(each.pool_gib for each in sizes_of(given).values())
    return Disk(given.disk, gib, given.copy)


def _directory(parent: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=parent, prefix="load-", ignore_cleanup_errors=True)
