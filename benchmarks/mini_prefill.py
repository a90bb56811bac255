"""Measures P's prefill of a long prompt in the mini engine, with and without saves.

    python -m benchmarks.mini_prefill --json benchmarks/results/h200_mini_prefill.json

Random weights in the shape of an 8B model with fewer layers; the pool is a directory of /dev/shm.
Three engines take turns in one process: one without the pool, one that saves by the native
library, one that saves by torch. Every prompt is another one, so that nothing is found.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.checkpoint import Shape, make_model
from benchmarks.report import Report
from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.request import Finish, Request, Token
from pdstore.settings import read_settings

WAYS = {
    "no pool": {},
    "native": {"native": "require"},
    "torch": {"native": "off"},
}
COLUMNS = [
    *("saves", "to the first token, s", "shortest", "longest", "of no pool"),
    *("to durable, s", "MiB saved a prompt"),
]
VOCABULARY = 32_000
BLOCK = 16


class Size(NamedTuple):
    """The size of the model and of the prompt."""

    layers: int
    hidden: int
    tokens: int
    chunk: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096, help="128 times the heads")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = Size(given.layers, given.hidden, given.tokens, given.chunk)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
        report = measure(size, given.device, given.rounds, Path(directory))
    print(report.text())
    if given.json:
        given.json.write_text(report.json() + "\n")


def measure(size: Size, device: str, rounds: int, directory: Path) -> Report:
    """Prefills on each engine in turn; the first round is not counted."""
    shape = Shape(VOCABULARY, size.layers, size.hidden, size.tokens + BLOCK)
    make_model(shape, directory / "model", device)
    engines = {way: open_engine(size, device, directory, way) for way in WAYS}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    chance = random.Random(0)
    for _ in range(rounds + 1):
        for way, engine in engines.items():
            prompt = [chance.randrange(VOCABULARY) for _ in range(size.tokens)]
            times[way].append(prefill(engine, prompt))
    for engine in engines.values():
        engine.stop()
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    report = Report(
        f"{name}: {size.tokens} tokens, {size.layers} layers of {size.hidden}, steps of"
        f" {size.chunk}; medians of {rounds} in turn",
        COLUMNS,
    )
    alone = median(first for first, _ in times["no pool"][1:])
    for way, found in times.items():
        firsts, ends = zip(*found[1:], strict=True)
        middle = median(firsts)
        saved = sum(f.stat().st_size for f in (directory / way).rglob("*") if f.is_file())
        row = (middle, min(firsts), max(firsts), middle / alone, median(ends))
        report.add(way, *row, saved / (rounds + 1) / 2**20)
    return report


def open_engine(size: Size, device: str, directory: Path, way: str) -> Engine:
    settings = read_settings(
        pd_transfer_via_storage=way != "no pool",
        store=f"file://{directory / way}",
        role="prefill",
        weights="random",
        deadline_s=60,
        **WAYS[way],
    )
    return Engine(
        Config(
            model=directory / "model",
            settings=settings,
            num_blocks=size.tokens // BLOCK + 2,
            block_size=BLOCK,
            max_num_batched_tokens=size.chunk,
            max_model_len=size.tokens + BLOCK,
            device=device,
            dtype="bfloat16",
            threads=torch.get_num_threads(),
        )
    )


def prefill(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Returns the seconds to the first token, and until all is published and blocks are free."""
    first, ended = threading.Event(), threading.Event()
    finishes: list[Finish] = []

    def sink(what: Token | Finish) -> None:
        first.set()
        if isinstance(what, Finish):
            finishes.append(what)
            ended.set()

    start = time.perf_counter()
    engine.submit(Request(prompt, 1, sink, ignore_eos=True))
    first.wait()
    took = time.perf_counter() - start
    ended.wait()
    if finishes[0].error:
        raise RuntimeError(finishes[0].error)
    while engine.cache.num_free < engine.cache.num_blocks:
        time.sleep(0.001)
    return took, time.perf_counter() - start


if __name__ == "__main__":
    main()
