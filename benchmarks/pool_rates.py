"""Measures one prompt's KV through KVPool to a store and back, by window and workers.

    python -m benchmarks.pool_rates --store shm --json FILE --pool /dev/shm

The KV of an 8B model in engine blocks of 16 tokens, in one process; with `--device cpu` and a
smaller `--tokens` it runs anywhere. Settings take turns; what is loaded is compared. Over files the
library takes four windows in a call.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.command import parser_of
from benchmarks.report import Report
from pdstore import KVPool, LayerSpec, Layout, PrefixCacheManager, Settings, open_store
from pdstore.settings import read_settings

ENGINE_BLOCK = 16
MIB = 1 << 20
STORES = {
    "file": "file://{directory}?budget={budget}",
    "shm": "shm://bench?size={budget}&dir={directory}",
}
COLUMNS = ["window, MiB", "workers", "save, GB/s", "load, GB/s", "slowest", "fastest"]


class Cache:
    """A paged cache with room for one prompt twice: where it is saved from, and where loaded to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.settings = self._settings(given, workers=2)
        self.layout = Layout.of(
            self.settings,
            dtype="bfloat16",
            layers=(LayerSpec(8, 128),) * given.layers,
            engine_block_tokens=ENGINE_BLOCK,
            rope="",
        )
        self.namespace = self.layout.namespace(self.settings, weights="random")
        self.num_blocks = given.tokens // ENGINE_BLOCK
        shape = (2 * self.num_blocks, ENGINE_BLOCK, 8, 256)
        self.layers = [
            torch.empty(shape, dtype=torch.bfloat16, device=given.device)
            for _ in range(given.layers)
        ]
        for layer in self.layers:
            layer.view(torch.int16).random_()
        ids = random.Random(0).sample(range(2 * self.num_blocks), 2 * self.num_blocks)
        self.source, self.target = ids[: self.num_blocks], ids[self.num_blocks :]
        self._given = given

    def _settings(self, given: argparse.Namespace, workers: int) -> Settings:
        return read_settings(
            store=STORES[given.store].format(directory=given.directory, budget=given.budget),
            staging=given.staging,
            workers=workers,
            native=given.native,
            weights="random",
            deadline_s=60,
        )

    @contextmanager
    def pool(self, window: int, workers: int) -> Iterator[tuple[KVPool, PrefixCacheManager]]:
        settings = self._settings(self._given, workers)
        store = open_store(settings.store, settings)
        manager = PrefixCacheManager(settings, self.namespace, store=store)
        pool = KVPool(
            settings,
            self.layout,
            self.layers,
            self.namespace,
            store=store,
            range_bytes=window * MIB,
        )
        try:
            yield pool, manager
        finally:
            pool.close()
            manager.close()
            store.close()

    def poison(self) -> None:
        for layer in self.layers:
            layer[self.target] = -7.0
        self._settle()

    def check(self) -> None:
        for layer in self.layers:
            if not torch.equal(
                layer[self.source].view(torch.int16), layer[self.target].view(torch.int16)
            ):
                raise RuntimeError("wrong bytes")

    def _settle(self) -> None:
        if self._given.device != "cpu":
            torch.cuda.synchronize()


def measure(cache: Cache, given: argparse.Namespace, window: int, workers: int) -> list[float]:
    """Returns one row: saves a prompt that is new to the pool, then loads it several times."""
    num_bytes = given.tokens * given.layers * 8 * 256 * 2
    prompt = [random.randrange(1 << 30) for _ in range(given.tokens)]
    rates = []
    with cache.pool(window, workers) as (pool, manager):
        keys = manager.keys(prompt)
        began = time.perf_counter()
        saved = pool.save(keys, cache.source).wait(120)
        save = num_bytes / (time.perf_counter() - began) / 1e9
        for n in range(given.rounds + 1):
            cache.poison()
            began = time.perf_counter()
            loaded = pool.load(keys, cache.target).wait(120)
            rates.append(num_bytes / (time.perf_counter() - began) / 1e9)
            if not saved.num_tokens == loaded.num_tokens == given.tokens:
                raise RuntimeError(f"{saved} {loaded}")
            if n == 0:
                cache.check()
        manager.clear()
    rates = sorted(rates[1:])
    return [window, workers, save, median(rates), rates[0], rates[-1]]


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--store", choices=STORES, default="file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="MiB")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 12, 16])
    parser.add_argument("--pool", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--staging", default="2GiB")
    parser.add_argument("--budget", default="12GiB")
    parser.add_argument("--native", default="require")
    given = parser.parse_args()
    given.directory = Path(tempfile.mkdtemp(dir=given.pool, prefix="pdstore-bench-"))
    on = torch.cuda.get_device_name() if given.device != "cpu" else "CPU"
    report = Report(f"{on}: {given.tokens} tokens, {given.rounds} loads a row", COLUMNS)
    try:
        cache = Cache(given)
        for window, workers in itertools.product(given.windows, given.workers):
            report.add(*measure(cache, given, window, workers))
            print(report.rows[-1], flush=True)
            if given.json:
                given.json.write_text(report.json() + "\n")
    finally:
        shutil.rmtree(given.directory, ignore_errors=True)
    print(report.text())


if __name__ == "__main__":
    main()
