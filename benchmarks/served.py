"""Measures what a client of a router, P and D waits for, beside one instance that computes alone.

    python -m benchmarks.served [--tokens 256 1024 4096] [--json FILE]
    python -m benchmarks.served --engine vllm --model DIR --gpus 0 1 --store URL -- VLLM OPTIONS

All are servers of this machine that are asked over HTTP, in turn, so that ratios hold while its
speed varies. A row has the median and the range of the time to the first token, the median of what
a client waits longer than for the instance alone, how many tokens D loaded of each prompt, and how
many of the answers began with P's token.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.checkpoint import Shape, make_model
from benchmarks.command import parser_of, run
from benchmarks.first_token import LETTERS, letters, start
from benchmarks.report import Report
from examples.demo.client import ask, counters
from examples.demo.processes import DemoError, Processes
from examples.ports import free_ports

COLUMNS = ["tokens", "asked", "first token, ms", "from", "to", "beyond alone, ms", "D loaded"]
COLUMNS += ["began with P's"]
ALONE = "one instance alone"
ROUTERS = {
    "relayed": (),
    "concurrent": ("--mode", "concurrent"),
    "relayed, P's first token": ("--first-token", "prefill"),
}
"""The ways in which P and D are asked: options of a router each."""

_ANSWER_TOKENS = 4
_LOADED, _SPLICED = "pdstore_tokens_total:loaded", "router_spliced_total"


class Sample(NamedTuple):
    """One answer.

    loaded: tokens that D loaded for it. spliced: 1 if it began with P's token.
    """

    ttft_s: float
    loaded: float
    spliced: float


def main() -> None:
    given = _parse()

    def measure() -> Report:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdstore-bench-") as directory:
            scratch = Path(directory)
            if given.model is None:
                given.model = scratch / "model"
                positions = max(2048, *given.tokens) + 64
                shape = Shape(len(LETTERS), given.layers, given.hidden, positions)
                make_model(shape, given.model, "cpu", "float32")
                letters().save_pretrained(given.model)
            with _servers(given, given.store or f"file://{scratch}/pool") as (urls, decode):
                return _measured(given, urls, decode)

    try:
        run(measure, given.json)
    except DemoError as error:
        sys.exit(str(error))


@contextlib.contextmanager
def _servers(given: argparse.Namespace, store: str) -> Iterator[tuple[dict[str, str], str]]:
    """Starts all servers. Yields the URL of each way to ask, and D's."""
    alone, p, d, *routers = (f"http://127.0.0.1:{port}" for port in free_ports(3 + len(ROUTERS)))
    pool = {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": store}
    pool["PDSTORE_WEIGHTS"] = "served"  # dummy weights have no digest
    first, last = given.gpus[0], given.gpus[-1]
    with Processes() as processes:
        for name, url, role, more in (
            ("alone", alone, "both", {"CUDA_VISIBLE_DEVICES": first}),
            ("prefill", p, "prefill", {**pool, "CUDA_VISIBLE_DEVICES": first}),
            ("decode", d, "decode", {**pool, "CUDA_VISIBLE_DEVICES": last}),
        ):
            start(processes, name, _engine(given, role), url, **more)
            if name == "alone":  # vLLM measures its GPU's memory at the start: one at a time
                processes.wait_ready(given.start_seconds, lambda text: None)
        for number, (url, options) in enumerate(zip(routers, ROUTERS.values(), strict=True)):
            router = ["pdstore.router", "--prefill", p, "--decode", d, *options]
            start(processes, f"router-{number}", router, url)
        processes.wait_ready(given.start_seconds, lambda text: None)
        yield {ALONE: alone, **dict(zip(ROUTERS, routers, strict=True))}, d


def _engine(given: argparse.Namespace, role: str) -> list[str]:
    """Returns the module that serves, and its options but the port."""
    if given.engine == "mini":
        own = ["examples.mini_engine", "--num-blocks", str(max(given.tokens) // 8 + 64)]
    else:
        own = ["examples.vllm_serve", *(() if given.options else ("--tiny",))]
    return [*own, "--model", str(given.model), "--role", role, *given.options]


def _measured(given: argparse.Namespace, urls: dict[str, str], decode: str) -> Report:
    title = f"{given.engine}, over HTTP: to the first token, medians of {given.rounds}"
    report = Report(title, COLUMNS)
    for num_tokens in given.tokens:
        taken: dict[str, list[Sample]] = {way: [] for way in urls}
        for number in range(given.rounds + 1):
            for way, url in urls.items():
                sample = _sample(url, decode, num_tokens, given.rest)
                if number:  # the first round warms up
                    taken[way].append(sample)
        alone = [sample.ttft_s for sample in taken[ALONE]]
        for way, samples in taken.items():
            times = [1e3 * sample.ttft_s for sample in samples]
            beyond = median(
                1e3 * (sample.ttft_s - own) for sample, own in zip(samples, alone, strict=True)
            )
            loaded = median(sample.loaded for sample in samples)
            spliced = sum(sample.spliced for sample in samples)
            row = (median(times), min(times), max(times), beyond, loaded, spliced)
            report.add(num_tokens, way, *row)
    return report


def _sample(url: str, decode: str, num_tokens: int, rest_s: float) -> Sample:
    """Asks for a prompt that nobody has seen; then P has time to store it."""
    prompt = [random.randrange(len(LETTERS)) for _ in range(num_tokens)]

    def counts() -> tuple[float, float]:
        return counters(decode).get(_LOADED, 0), counters(url).get(_SPLICED, 0)

    loaded, spliced = counts()
    answer = ask(url, prompt, _ANSWER_TOKENS)
    time.sleep(rest_s)
    after = counts()
    return Sample(answer.ttft_s, after[0] - loaded, after[1] - spliced)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    add = parser.add_argument
    add("--engine", choices=("mini", "vllm"), default="mini")
    add("--model", type=Path, help="a checkpoint's directory; a tiny one is made otherwise")
    add("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    add("--store", help="the pool of P and D (files in memory)")
    add(
        "--gpus",
        nargs="+",
        default=["0"],
        help="P and the lone instance have the first, D the last",
    )
    add("--rest", type=float, default=0.3, help="seconds between two prompts")
    add("--start-seconds", type=float, default=300, help="for the servers")
    add("--layers", type=int, default=4, help="of the tiny checkpoint")
    add("--hidden", type=int, default=256)
    add("options", nargs="*", help="of each engine, behind --; vllm without: for a tiny model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
