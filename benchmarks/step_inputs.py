"""Measures the share of a decode step that the mini engine takes to prepare its inputs.

    python -m benchmarks.step_inputs --json benchmarks/results/step_inputs.json

It bounds the gain of preparing the next step's inputs on an AsyncRunner, beside the step before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.checkpoint import Shape, make_model
from benchmarks.command import parser_of, run
from benchmarks.report import Report
from examples.mini_engine.attention import Chunk, Step
from examples.mini_engine.config import Config
from examples.mini_engine.model import Model
from examples.mini_engine.paged_cache import PagedCache
from examples.mini_engine.request import Request
from pdstore.settings import read_settings

COLUMNS = ["tokens each", "requests", "inputs, ms", "whole step, ms", "most to gain, %"]
BLOCK = 16
WARM_UP = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="128 times the heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    given = parser.parse_args()
    run(lambda: measure_all(given), given.json)


def measure_all(given: argparse.Namespace) -> Report:
    report = Report(
        f"{given.device}: decode steps, {given.layers} layers of {given.hidden};"
        f" medians of {given.rounds}",
        COLUMNS,
    )
    for tokens in given.tokens:
        for count in given.requests:
            shape = Shape(2000, given.layers, given.hidden, tokens + 2 * given.rounds + BLOCK)
            inputs, step = measure(shape, given.device, tokens, count, given.rounds)
            report.add(tokens, count, inputs * 1e3, step * 1e3, 100 * inputs / step)
    return report


def measure(shape: Shape, device: str, tokens: int, count: int, rounds: int) -> tuple[float, float]:
    """Returns the seconds of preparing the inputs of a step, and of all of it."""
    config, model = open_model(shape, device, count)
    cache = PagedCache(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        config.num_blocks,
        BLOCK,
        torch.float32,
        device,
    )
    requests = [Request([1] * tokens, 2 * rounds, lambda event: None) for _ in range(count)]
    for request in requests:
        request.block_ids = cache.allocate(cache.blocks_for(shape.positions)) or []
    took = []
    for round_ in range(rounds + WARM_UP):
        end = tokens + round_
        chunks = [Chunk(request, end - 1, end) for request in requests]
        start = time.perf_counter()
        Step(chunks, cache)
        prepared = time.perf_counter()
        model.forward(chunks, cache)
        took.append((prepared - start, time.perf_counter() - prepared))
        for request in requests:
            request.token_ids.append(1)
    inputs, steps = zip(*took[WARM_UP:], strict=True)
    return median(inputs), median(steps)


def open_model(shape: Shape, device: str, count: int) -> tuple[Config, Model]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
        model = Path(directory) / "model"
        make_model(shape, model, device)
        config = Config(
            model=model,
            settings=read_settings(),
            num_blocks=count * -(-shape.positions // BLOCK),
            block_size=BLOCK,
            device=device,
        )
        return config, Model(config)


if __name__ == "__main__":
    main()
