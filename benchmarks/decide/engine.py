"""Compares the ways of PDSTORE_LOAD on the mini engine, over a real store whose reads are slowed.

    python -m benchmarks.decide.engine --json benchmarks/results/decide_engine.json

A D of random weights for each way gets prompts that P has saved, some at once. The ways are asked
in turn, so that ratios hold while the machine's speed varies; the first waves do not count.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.checkpoint import Shape, make_model
from benchmarks.command import parser_of, run
from benchmarks.report import Report
from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.request import Finish, Request, Token
from pdstore.settings import read_settings

COLUMNS = ["store_mb_s", "at_once", "tokens", "load_s", "compute_s", "auto_s", "auto_decided"]
MODES = ("always", "never", "auto")
SHAPE = Shape(vocabulary=2000, layers=2, hidden=512, positions=1088)
TOKENS, BLOCK = 1024, 16
LEARNING_WAVES = 3


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("--stores", type=int, nargs="+", default=[2, 10, 50], metavar="MB/S")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--waves", type=int, default=8)
    given = parser.parse_args()
    run(lambda: measure(given), given.json)


def measure(given: argparse.Namespace) -> Report:
    title = f"mini engine on the CPU: seconds to the first token, medians of {given.waves} waves"
    report = Report(title, COLUMNS)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
        model = Path(directory) / "model"
        make_model(SHAPE, model, "cpu", "float32")
        for mb_s in given.stores:
            for at_once in given.at_once:
                p = open_engine(model, "prefill", f"memory://{mb_s}-{at_once}", "always")
                ways = [Way(model, mode, mb_s, at_once) for mode in MODES]
                for _ in range(LEARNING_WAVES + given.waves):
                    prompts = hand_over(p, at_once)
                    for way in ways:
                        way.wave(prompts)
                report.add(mb_s, at_once, TOKENS, *(way.median_s() for way in ways), ways[2].said())
                for engine in (p, *(way.engine for way in ways)):
                    engine.stop()
    return report


class Way:
    """A D that follows one way of PDSTORE_LOAD, whose reads of the store are slowed."""

    def __init__(self, model: Path, mode: str, mb_s: int, at_once: int) -> None:
        rates = f"bytes_per_s={mb_s}MB&error_rate=0&miss_rate=0&corrupt_rate=0"
        url = f"faulty+memory://{mb_s}-{at_once}?{rates}"
        self.engine = open_engine(model, "decode", url, mode)
        self._waves: list[list[float]] = []
        self._decided: list[str] = []

    def wave(self, prompts: Sequence[Request]) -> None:
        """Asks for prompts that P has saved, and notes the times of their first tokens."""
        asked = [
            Request(saved.token_ids[:TOKENS], 1, ignore, kv_transfer_params=saved.answer_params)
            for saved in prompts
        ]
        self._waves.append(first_token(self.engine, asked))
        self._decided += [request.decided["decision"] for request in asked if request.decided]

    def median_s(self) -> float:
        """Returns the median, over the waves that count, of the last request's first token."""
        return median(max(times) for times in self._waves[LEARNING_WAVES:])

    def said(self) -> str:
        """Returns how often D took each decision, in the waves that count."""
        num_early = LEARNING_WAVES * len(self._waves[0])
        counted = Counter(self._decided[num_early:])
        return ", ".join(f"{count} {way}" for way, count in counted.most_common())


def hand_over(p: Engine, at_once: int) -> list[Request]:
    """Has P compute new prompts; returns its requests when all of them are stored."""
    params = {"do_remote_decode": True}
    saved = [
        Request(random.choices(range(2000), k=TOKENS), 1, ignore, kv_transfer_params=params)
        for _ in range(at_once)
    ]
    for request in saved:
        first_token(p, [request])
    assert p.adapter is not None
    p.adapter.pool.flush(60)  # what D follows is always loaded
    return saved


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
        deadline_s=60,
    )
    config = Config(
        model=model,
        settings=settings,
        num_blocks=9 * TOKENS // BLOCK,
        max_num_batched_tokens=TOKENS,
        max_model_len=TOKENS + BLOCK,
    )
    return Engine(config)


if __name__ == "__main__":
    main()
