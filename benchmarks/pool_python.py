"""Counts what a save and a load cost an engine that runs beside them: its wait for the GIL.

    python -m benchmarks.pool_python --json benchmarks/results/pool_python.json

An engine's thread launches kernels from Python; while a worker of pdstore runs Python, it waits. So
this sums, over all of pdstore's threads, the processor's time that is not spent in the native
library, and how often one of them had to wait and then took the lock again. Times are for a prompt
whose blocks hold little: the shares, calls and values are those of an 8B model, the copies are
not. Both vary with the machine, the waits less.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from pdstore import KVPool, LayerSpec, Layout, PrefixCacheManager, SavePlan
from pdstore.format.plan import Announcement
from pdstore.metrics import Metrics
from pdstore.native.library import load_library
from pdstore.settings import Settings, read_settings
from pdstore.store import Store
from pdstore.store.connect import connect_store
from pdstore.store.transfer import RANGE_BYTES
from pdstore.store.wrappers import HookedStore

LAYERS = 32
HEAD_DIM = 2
SCALE = 8 * 128 // HEAD_DIM
"""Blocks are smaller than those of eight heads of 128 by this factor."""
ENGINE_BLOCK = 16


class Cost(NamedTuple):
    """Nanoseconds of Python and waits that pdstore's threads have used so far."""

    python_ns: int
    num_waits: int

    def since(self, before: Cost) -> Cost:
        return Cost(self.python_ns - before.python_ns, self.num_waits - before.num_waits)


class TimedCalls:
    """Passes on the library's calls that free the GIL; sums pdstore's time in them."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.native_ns = 0
        self._adding = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = getattr(self._calls, name)

        def timed(*args: object) -> int:
            began = time.thread_time_ns()
            code = call(*args)
            if threading.current_thread().name.startswith("pdstore-"):
                with self._adding:
                    self.native_ns += time.thread_time_ns() - began
            return int(code)

        setattr(self, name, timed)
        return timed

    def cost(self) -> Cost:
        """Returns the use of the threads that are alive now."""
        cpu_ns = num_waits = 0
        for thread in threading.enumerate():
            if thread.name.startswith("pdstore-"):
                task = Path(f"/proc/self/task/{thread.native_id}")
                cpu_ns += int((task / "schedstat").read_text().split()[0])
                status = dict(
                    line.split(":\t") for line in (task / "status").read_text().splitlines()
                )
                num_waits += int(status["voluntary_ctxt_switches"])
        return Cost(cpu_ns - self.native_ns, num_waits)


class Bench:
    """Both halves over one store, in this process, and a paged cache for two prompts."""

    def __init__(self, store: str, settings: Settings, num_tokens: int, is_wrapped: bool) -> None:
        self.store, self.num_tokens = store, num_tokens
        self.num_blocks = num_tokens // ENGINE_BLOCK
        layout = Layout.of(
            settings,
            dtype="bfloat16",
            layers=(LayerSpec(1, HEAD_DIM),) * LAYERS,
            engine_block_tokens=ENGINE_BLOCK,
            rope="",
        )
        shape = (2 * self.num_blocks, ENGINE_BLOCK, 1, 2 * HEAD_DIM)
        caches = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS)]
        namespace = layout.namespace(settings, weights="random")
        self.cache = PrefixCacheManager(settings, namespace)
        metrics = Metrics()
        opened: Store = connect_store(settings, metrics)
        if is_wrapped:
            self.store, opened = f"{store}, wrapped", HookedStore(opened)
        self._opened = opened
        self.pool = KVPool(
            settings,
            layout,
            caches,
            namespace,
            store=opened,
            metrics=metrics,
            range_bytes=RANGE_BYTES // SCALE,
        )
        self.pool.ready()

    def save(self, number: int) -> None:
        """Saves a prompt as P does: `started`, its blocks, the check, `done`."""
        keys = self.cache.keys([number] * self.num_tokens)
        handoff, _ = self.cache.announce(keys)
        plan = SavePlan(keys, handoff=handoff, announce=Announcement(handoff, self.num_tokens))
        save = self.pool.begin_save(plan, range(self.num_blocks))
        save.layers_done(LAYERS)
        if save.job.wait(60).reason:
            raise RuntimeError(f"{save.job.result}")

    def load(self, number: int) -> None:
        keys = self.cache.keys([number] * self.num_tokens)
        loaded = self.pool.load(keys, range(self.num_blocks, 2 * self.num_blocks)).wait(60)
        if loaded.num_tokens != self.num_tokens:
            raise RuntimeError(f"{loaded}")

    def close(self) -> None:
        self.pool.close()
        self.cache.close()
        self._opened.close()


def measure(report: Report, benches: Sequence[Bench], calls: TimedCalls, rounds: int) -> None:
    """Measures the same jobs with all benches, in turns, so that the machine's moods even out."""
    for verb in ("save", "load"):
        costs: dict[Bench, list[Cost]] = {bench: [] for bench in benches}
        seconds: dict[Bench, list[float]] = {bench: [] for bench in benches}
        for number in range(rounds + 1):
            for bench in benches:
                before, began = calls.cost(), time.perf_counter()
                getattr(bench, verb)(number)
                seconds[bench].append(time.perf_counter() - began)
                costs[bench].append(calls.cost().since(before))
        for bench in benches:
            report.add(
                bench.store,
                verb,
                bench.num_tokens,
                median(cost.python_ns for cost in costs[bench][1:]) / 1e6,
                median(cost.num_waits for cost in costs[bench][1:]),
                median(seconds[bench][1:]) * 1e3,
            )


def measure_all(given: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    report = Report(
        f"{given.workers} workers: what pdstore's threads take from an engine",
        ["store", "job", "tokens", "Python, ms", "waits", "all, ms"],
    )
    library = load_library(read_settings(native="require"), for_gpu=False)
    assert library is not None
    calls = TimedCalls(library.calls)
    library.calls = calls  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        urls = {
            "shm": "shm://{}?size=256MiB&dir={}",
            "file": "file://{1}/{0}?budget=1GiB",
        }
        for (name, url), num_tokens in product(urls.items(), given.tokens):
            benches = []
            for kind in ["bare", "wrapped"] if given.wrapped else ["bare"]:
                settings = read_settings(
                    store=url.format(kind, directory),
                    workers=given.workers,
                    native="require",
                    layer_ranges=4,
                )
                benches.append(Bench(name, settings, num_tokens, kind == "wrapped"))
            measure(report, benches, calls, given.rounds)
            for bench in benches:
                bench.close()
    return report


def main() -> None:
    parser = parser_of(__doc__, rounds=20)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--wrapped", action="store_true", help="also through a wrapper, in turns")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    given = parser.parse_args()
    run(lambda: measure_all(given), given.json)


if __name__ == "__main__":
    main()
