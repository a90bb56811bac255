"""Measures how long an engine's thread takes to launch its steps while pdstore loads and saves.

    python -m benchmarks.launch [--cpu] [--workers 2 4 16] [--json FILE]

An engine queues hundreds of kernels for a step. Threads of pdstore that take the GIL or the
driver meanwhile make that longer, and a small prefill takes as long as its launch. Here a step is
as many tiny kernels; loads and saves of an 8B model's shape begin before a step is launched, or
behind it, a few each second, as under load. With --cpu the kernels are calls on the CPU and blocks
hold little: that shows the lock alone. Milliseconds of one step, and of the processor in it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from pdstore import KVPool, LayerSpec, Layout, PrefixCacheManager
from pdstore.settings import read_settings
from pdstore.worker.job import Job
from pdstore.worker.swap.base import AT_ONCE

COLUMNS = [
    "workers",
    "beside",
    "begun",
    "steps",
    "p50, ms",
    "p90",
    "p99",
    "CPU p50, ms",
    "load, ms",
]
LAYERS, BLOCK = 32, 64
LOADED, SAVED = 7168, 1536  # tokens
PROMPTS = 4
KERNELS = 640
PAUSE_S = 0.01  # between two steps, which the device takes for the model


class Step(NamedTuple):
    """Seconds of one launch: by the clock, and of the processor."""

    wall_s: float
    cpu_s: float


class Bench:
    """A pool over an arena, some stored prompts, and an engine's thread: the caller's.

    head: channels of a head; the real model has 128.
    """

    def __init__(self, directory: Path, device: str, workers: int, head: int) -> None:
        num_bytes = PROMPTS * LOADED * LAYERS * 2 * 8 * head * 2
        url = f"shm://launch{workers}?size={8 * num_bytes}&lease=1&dir={directory}"
        more = {"role": "prefill", "native": "require", "layer_ranges": 4}  # P's saves are all made
        settings = read_settings(store=url, workers=workers, **more)
        layout = Layout.of(
            settings,
            dtype="bfloat16",
            layers=[LayerSpec(8, head)] * LAYERS,
            engine_block_tokens=BLOCK,
            rope="",
        )
        self._num_blocks = LOADED // BLOCK
        shape = (2, 2 * self._num_blocks, BLOCK, 8, head)  # K and V lie apart, as in vLLM
        both = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        caches = [(each[0], each[1]) for each in both]
        namespace = layout.namespace(settings, weights="launch")
        self._cache = PrefixCacheManager(settings, namespace)
        self._pool = KVPool(settings, layout, caches, namespace)
        self._pool.ready()
        self._tensor = torch.zeros(8, device=device)
        self._is_gpu = device != "cpu"
        self._number = 0
        self.load_s: list[float] = []
        for number in range(PROMPTS):
            keys = self._cache.keys([number] * LOADED)
            self._pool.save(keys, range(self._num_blocks)).wait(60)

    def steps(self, what: str, when: str, seconds: float, rate: float) -> Iterator[Step]:
        """Yields each launch; `load_s` has the seconds of the loads then."""
        self.load_s.clear()
        begin, done = time.monotonic(), 0
        jobs: list[Job] = []
        while (passed := time.monotonic() - begin) < seconds:
            due = what != "nothing" and passed * rate >= done
            done += due
            if due and when == "before":
                jobs += self._start(what)
            yield self._launch()
            if due and when == "behind":
                jobs += self._start(what)
            if self._is_gpu:
                torch.cuda.synchronize()
            time.sleep(PAUSE_S)
        for job in jobs:
            job.wait(60)

    def close(self) -> None:
        self._pool.close()
        self._cache.close()

    def _start(self, what: str) -> Iterator[Job]:
        """Begins a load, a save, or both."""
        self._number += 1
        if what != "saves":
            keys = self._cache.keys([self._number % PROMPTS] * LOADED)
            blocks = range(self._num_blocks, 2 * self._num_blocks)
            load = self._pool.load(keys, blocks, ready=AT_ONCE)
            load.on_end(lambda job: self.load_s.append(time.monotonic() - job.began))
            yield load
        if what != "loads":
            keys = self._cache.keys([1000 + self._number] * SAVED)
            yield self._pool.save(keys, range(SAVED // BLOCK))

    def _launch(self) -> Step:
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(KERNELS):
            self._tensor.add_(1)
        return Step(time.perf_counter() - wall, time.thread_time() - cpu)


def measure(given: argparse.Namespace) -> Report:
    device, head = ("cpu", 2) if given.cpu else ("cuda", 128)
    report = Report(f"{KERNELS} kernels a step, {given.rate:g} loads and saves a second", COLUMNS)
    with tempfile.TemporaryDirectory(dir=given.pool) as directory:
        for workers in given.workers:
            bench = Bench(Path(directory), device, workers, head)
            for what in ("nothing", "loads", "saves", "both"):
                for when in ("before", "behind") if what != "nothing" else ("",):
                    _add(report, (workers, what, when), bench, given)
            bench.close()
    return report


def _add(
    report: Report, row: tuple[int, str, str], bench: Bench, given: argparse.Namespace
) -> None:
    steps = sorted(bench.steps(row[1], row[2], given.seconds, given.rate))
    loads = sorted(bench.load_s)
    walls = [1e3 * steps[int(share * (len(steps) - 1))].wall_s for share in (0.5, 0.9, 0.99)]
    cpu = sorted(step.cpu_s for step in steps)[len(steps) // 2]
    load = 1e3 * loads[len(loads) // 2] if loads else 0.0
    report.add(*row, len(steps), *walls, 1e3 * cpu, load)


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    add = parser.add_argument
    add("--cpu", action="store_true", help="without a GPU")
    add("--workers", type=int, nargs="+", default=[2, 4, 16])
    add("--rate", type=float, default=6.0, help="loads, and saves, a second")
    add("--seconds", type=float, default=4.0, help="of each row")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a directory in memory")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


if __name__ == "__main__":
    main()
