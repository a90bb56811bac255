"""Compares the ways of PDSTORE_LOAD on the mini engine, over a real store whose reads are slowed.

    python -m benchmarks.decide.engine --json benchmarks/results/decide_engine.json

A D of random weights gets prompts that P has saved, some at once; the first waves do not count.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoint import Shape, make_model
from benchmarks.command import run
from benchmarks.decide.__main__ import percentile
from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.request import Finish, Request, Token
from pdstore.cli.report import Report
from pdstore.settings import read_settings

COLUMNS = ["store_mb_s", "at_once", "tokens", "load_p99_s", "compute_p99_s", "auto_p99_s"]
SHAPE = Shape(vocabulary=2000, layers=2, hidden=512, positions=1088)
TOKENS, BLOCK = 1024, 16
LEARNING_WAVES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stores", type=int, nargs="+", default=[5, 100], metavar="MB/S")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    report = Report("mini engine on the CPU: seconds to the first token, p99", COLUMNS)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
        model = Path(directory) / "model"
        make_model(SHAPE, model, "cpu", "float32")
        for mb_s in given.stores:
            for at_once in given.at_once:
                cell = (mb_s, at_once, given.waves)
                modes = ("always", "never", "auto")
                times = [p99_of(model, mode, *cell) for mode in modes]
                report.add(mb_s, at_once, TOKENS, *times)
    return report


def p99_of(model: Path, mode: str, mb_s: int, at_once: int, waves: int) -> float:
    """Hands waves of prompts over and returns the p99 of the first tokens' times."""
    name = f"decide-{mode}-{mb_s}-{at_once}"
    rates = f"bytes_per_s={mb_s}MB&error_rate=0&miss_rate=0&corrupt_rate=0"
    p = open_engine(model, "prefill", f"memory://{name}", "always")
    d = open_engine(model, "decode", f"faulty+memory://{name}?{rates}", mode)
    chance, took = random.Random(0), []
    for wave in range(LEARNING_WAVES + waves):
        prompts = [[chance.randrange(2000) for _ in range(TOKENS)] for _ in range(at_once)]
        asked = []
        for prompt in prompts:
            saved = Request(prompt, 1, ignore, kv_transfer_params={"do_remote_decode": True})
            first_token(p, [saved])
            asked.append(Request(prompt, 1, ignore, kv_transfer_params=saved.answer_params))
        times = first_token(d, asked)
        if wave >= LEARNING_WAVES:
            took += times
    p.stop()
    d.stop()
    return percentile(took, 0.99)


def first_token(engine: Engine, requests: list[Request]) -> list[float]:
    """Asks all requests at once; returns the seconds until the first token of each."""
    events: queue.SimpleQueue[float] = queue.SimpleQueue()
    start = time.perf_counter()

    def sink(event: Token | Finish) -> None:
        if isinstance(event, Finish):
            events.put(time.perf_counter() - start)

    for request in requests:
        request.sink = sink
        engine.submit(request)
    return [events.get(timeout=120) for _ in requests]


def ignore(event: Token | Finish) -> None:
    """Takes an event and does nothing."""


def open_engine(model: Path, role: str, url: str, load: str) -> Engine:
    settings = read_settings(
        pd_transfer_via_storage=True,
        role=role,
        store=url,
        load=load,
        weights="random",
        load_deadline_s=60,
        save_deadline_s=60,
    )
    config = Config(
        model=model,
        settings=settings,
        num_blocks=8 * TOKENS // BLOCK,
        max_num_batched_tokens=TOKENS,
        max_model_len=TOKENS + BLOCK,
    )
    return Engine(config)


if __name__ == "__main__":
    main()
