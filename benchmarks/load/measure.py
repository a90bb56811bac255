"""Starts each kind of servers, loads it in windows, and reports what its users saw."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx

from benchmarks.load.client import Answer, Client, Mode
from benchmarks.load.kinds import Fleet, kinds
from benchmarks.load.workloads import WORKLOADS, Plan, Sizes
from benchmarks.report import Cell, Report
from examples.demo.client import counters
from examples.demo.processes import ROOT, DemoError, Processes

COLUMNS = ["kind", "workload", "window", "rate", "answers/s", "tokens/s"]
TIMES = ["first turn p50, s", "p90", "p99", "later turn p50, s", "later p90", "later p99"]
TIMES += ["between mean, ms", "between p90", "between p99", "beyond P p50, ms", "beyond P p99"]
COUNTS = ["loaded tokens", "computed tokens", "preempted", "unanswered", "errors"]
_LOADED = ("vllm:external_prefix_cache_hits_total", "pdstore_tokens_total:loaded")
_COMPUTED = "vllm:prompt_tokens_by_source_total:local_compute"
_PREEMPTED = "vllm:num_preemptions_total"
_WARM_UP = 3
T = TypeVar("T")


def measure_apart(given: argparse.Namespace) -> Report:
    """Runs every kind in a process of its own, all at the same time."""
    report, count = _report_of(given), len(given.kinds)
    cpus = sorted(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        parts = []
        for number, kind in enumerate(given.kinds):
            share = {"kinds": [kind], "gpus": _share(given.gpus, number, count), "json": None}
            part = argparse.Namespace(**vars(given) | share)
            parts.append(processes.submit(_measure_on, part, _share(cpus, number, count)))
        for done in as_completed(parts):
            report.rows += done.result().rows
            report.notes += done.result().notes[len(given.workload) :]
            _write(given, report)
    return report


def _measure_on(given: argparse.Namespace, cpus: list[int]) -> Report:
    os.sched_setaffinity(0, cpus)
    return measure(given)


def _share(things: list[T], number: int, count: int) -> list[T]:
    size = len(things) // count
    return things[number * size : (number + 1) * size]


def _report_of(given: argparse.Namespace) -> Report:
    way = ", in turns" if given.beside else ", all kinds at once" if given.apart else ""
    what = f"{', '.join(given.workload)}, {given.engine}, seed {given.seed}"
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
    with tempfile.TemporaryDirectory(dir=given.pool, prefix="load-") as scratch:
        for together in [names] if given.beside else [[name] for name in names]:
            try:
                _measure(given, together, Path(scratch), report)
            except DemoError as error:
                report.notes.append(f"{together}: {error}")
            _write(given, report)
    return report


def _measure(given: argparse.Namespace, names: list[str], scratch: Path, report: Report) -> None:
    """Starts the servers of some kinds, loads them in turns, and reports a row for each window.

    Every workload and rate has prompts of its own, since the pools keep those of the ones before.
    """
    sizes = sizes_of(given)
    engine = replace(sizes[given.workload[0]], longest=max(each.longest for each in sizes.values()))
    cells = [
        (what, rate)
        for what in given.workload
        for rate in (WORKLOADS[what].is_open and given.rates) or [sizes[what].rate]
    ]
    with contextlib.ExitStack() as pools, Processes() as processes:
        how = given.engine, given.options, given.gpus
        fleet = Fleet(processes, scratch, engine, *how, is_cpu=given.cpu)
        started = []
        for name in names:
            pool = Path(pools.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            what, *settings = name.split("+")
            what, _, tree = what.partition("@")
            root = Path(given.trees[tree]).resolve() if tree else ROOT
            kind = kinds(pool, engine, dict(setting.split("=", 1) for setting in settings))[what]
            started.append((name, kind, fleet.start(name, kind, root, given.start_seconds)))
        servers = [
            (name, kind.mode, urls, fleet.asked(kind, urls, given.start_seconds))
            for name, kind, urls in started
        ]
        for number, (what, rate) in enumerate(cells):
            plan = Plan(replace(sizes[what], rate=rate), given.seed + number, given.trace)
            loads = [_Load(*each) for each in servers]
            asyncio.run(_take_turns(given, what, plan, loads, report))
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

        def more(*names: str) -> int:
            counts = (sum(new.get(n, 0) - old.get(n, 0) for old, new in pairs) for n in names)
            return int(max(counts))

        counts = [more(*_LOADED), more(_COMPUTED), more(_PREEMPTED)]
        ended = [a for a in self.client.answers if 0 <= a.times[-1] - begin < seconds]
        times = [time - begin for answer in self.client.begun for time in answer.times]
        tokens = sum(0 <= time < seconds for time in times)
        rates: list[Cell] = [len(ended) / seconds, tokens / seconds]
        errors = len(self.client.errors)
        return [*rates, *_times(ended), *counts, self.client.num_open, errors]

    async def pause(self) -> None:
        self.client.gate.clear()
        while self.client.num_open:
            await asyncio.sleep(0.05)


async def _take_turns(
    given: argparse.Namespace, what: str, plan: Plan, loads: list[_Load], report: Report
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
        for number, load in itertools.product(range(given.windows), loads):
            again_s = given.again if given.beside else 0.0
            warm_s = again_s if number else given.warm
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
    texts = (f"{what} {value:.3g};" for what, value in shown)
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
    changes = {"users": given.users, "pool_gib": given.pool_gib, "gpu": given.gpu}
    changes = {name: value for name, value in changes.items() if value is not None}
    sizes = {what: WORKLOADS[what].sizes for what in given.workload}
    if given.cpu:
        sizes = {what: each.shrunk() for what, each in sizes.items()}
    return {what: replace(each, **changes) for what, each in sizes.items()}
