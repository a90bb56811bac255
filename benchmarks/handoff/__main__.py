"""The hand-off as a client waits for it, side by side: stores, modes, lengths of prompts.

    python -m benchmarks.handoff --cpu --json handoff.json
    python -m benchmarks.handoff --stores file shm --tokens 8192 32768 65536 --json FILE

P, D and an instance without a pool are processes of the mini engine (or of vLLM, --engine vllm);
on GPUs P and the lone instance are on the first, D is on the second if there is one. Each round
asks for every kind, in an order drawn anew and each after a rest, so that ratios hold while the
machine's speed varies, and no kind gains by what is asked before it. A row is the median of its
samples:

    {"store", "mode", "tokens", "exposed_s", "ttft_s", "prefill_s", "d_computed", ...}

NIXL and LMCache, installed beside vLLM, are measured as stores are, in the modes that they know:

    python -m benchmarks.handoff --engine vllm --block 64 --stores shm nixl lmcache --burst 0

Two versions side by side, each with a P and a D of its own, and no other instance:

    python3 -m benchmarks.handoff --trees before=../older now=. --stores shm --tokens 8192 65536

Models with states, beside one of other prompts that move as many bytes; and whether D answers as
one instance that computes the same chunks does, beside a D without states or indexers' pages:

    python -m benchmarks.handoff --engine vllm --models qwen3.5-4b llama-8b --stores shm --burst 0
    python -m benchmarks.handoff --engine vllm --models qwen3-next --stores shm --exact eager
    python -m benchmarks.handoff --engine vllm --models deepseek-v3.2 --stores shm --exact eager \\
        --vllm '{"kv_cache_dtype": "fp8_ds_mla"}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.handoff.engines import ENGINES, Setup, VllmSetup
from benchmarks.handoff.exact import WAYS, compare_all
from benchmarks.handoff.measure import MODES
from benchmarks.handoff.report import late_stores, rows_of, table
from benchmarks.handoff.run import Run, measure_floor
from benchmarks.peers import PEER_MODES, start_service
from benchmarks.report import machine
from benchmarks.shapes import SHAPES
from examples.demo.pools import open_pool
from examples.demo.processes import Processes

SMALL: dict[str, Any] = {
    **{"stores": ["file"], "tokens": [1024, 4096], "rounds": 3, "layers": 4, "hidden": 256},
    **{"chunk": 512, "burst_tokens": 1024, "pool_size": "1GiB"},
}
MODELS = f"for vLLM: {', '.join(SHAPES)}, or a directory; others get as many bytes as the first"
STORES = "file, shm, redis, mooncake, NAME=URL; with vLLM also nixl, lmcache: others' connectors"
LARGE: dict[str, Any] = {
    **{"stores": ["file", "shm"], "tokens": [1024, 2048, 8192, 32768, 65536], "rounds": 5},
    **{"layers": 32, "hidden": 4096, "chunk": 8192, "burst_tokens": 8192, "pool_size": "32GiB"},
}
_SERVICE_S = 120.0


def main() -> None:
    given = parse()
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine()}
    found["given"] = {name: str(value) for name, value in vars(given).items()}
    with contextlib.ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(dir=given.pool, prefix="pdstore-bench-")
        scratch = Path(stack.enter_context(directory))
        setup = ENGINES[given.engine](scratch, given)
        stack.callback(setup.stop)
        start_all(setup, given, scratch, stack)
        found["about"] = setup.ready()
        run = Run(given, setup, began)
        run.say(f"{len(setup.instances)} instances are up")
        if given.exact and isinstance(setup, VllmSetup):
            compare_all(setup.answers(), given, found)
            return
        if not given.cpu:
            found["floor"] = measure_floor()
        run.measure()
        found |= {"rows": rows_of(run.samples), "alone_prefill_s": run.prefills}
        found["control_prefill_s"] = run.controls
        found |= {"bursts": run.bursts, "samples": [asdict(sample) for sample in run.samples]}
        if given.check_following:
            run.measure_leads()
            found["leads"] = run.leads
        print(table(found))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    late = late_stores(run.leads)
    if late:
        sys.exit(f"D's loads waited for P's `done` over {', '.join(late)}")


def start_all(
    setup: Setup, given: argparse.Namespace, scratch: Path, stack: contextlib.ExitStack
) -> None:
    """Starts the pairs of each tree; or of this one, with an instance that has no pool."""
    for name, tree in (each.split("=", 1) for each in given.trees or ()):
        (scratch / name).mkdir()
        setup.tree = Path(tree)
        stores = stack.enter_context(open_stores(given, scratch / name))
        start_pairs(setup, given, stores, name)
    if given.trees:
        return
    setup.start_alone()
    stores = stack.enter_context(open_stores(given, scratch))
    start_pairs(setup, given, stores)
    if given.exact and isinstance(setup, VllmSetup):
        setup.start_stateless(stores)


def start_pairs(
    setup: Setup, given: argparse.Namespace, stores: dict[str, str], tree_name: str = ""
) -> None:
    """Starts a P and a D for each model, store and size of blocks."""
    for model, (store, url), block in product(given.models, stores.items(), given.block):
        name = store if len(given.block) == 1 else f"{store} {block}"
        name += f" {Path(model).name}" if len(given.models) > 1 else ""
        setup.model = model
        setup.start_pair(f"{name} {tree_name}".rstrip(), url, block)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU; seconds")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="mini")
    parser.add_argument("--stores", nargs="+", help=STORES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, help="samples of each kind, after one to warm up")
    parser.add_argument("--burst", type=int, default=4, help="prompts at once; 0: none")
    parser.add_argument("--burst-tokens", type=int)
    parser.add_argument("--pool", type=Path, help="a memory-backed directory (default /dev/shm)")
    parser.add_argument("--pool-size", default=None, help="of each store, such as 24GiB")
    _add_sizes(parser)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after this time")
    _add_comparisons(parser)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name, value in (SMALL if given.cpu else LARGE).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.pool = given.pool or Path("/dev/shm")
    given.burst = 0 if given.trees else given.burst
    if given.trees and given.control:
        parser.error("--trees goes without --control")
    if given.exact and (given.engine == "mini" or given.trees or len(given.models) > 1):
        parser.error("--exact goes with --engine vllm and one model, and without --trees")
    if given.engine == "mini" and not PEER_MODES.keys().isdisjoint(given.stores):
        parser.error(f"--stores: {' and '.join(PEER_MODES)} go with --engine vllm")
    return given


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["llama-8b"], metavar="NAME", help=MODELS)
    parser.add_argument("--vllm", type=json.loads, default={}, help="more of vllm.LLM, as JSON")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--chunk", type=int, help="tokens of a step of the engine")
    parser.add_argument(
        "--block",
        type=int,
        nargs="+",
        default=[16],
        help="tokens of a block of the pairs, for vLLM on GPUs; the lone instance has the first",
    )


def _add_comparisons(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trees",
        nargs="+",
        metavar="NAME=DIR",
        help="checkouts to compare, where pdstore is not installed: an editable install goes first",
    )
    text = "time prefills by a second instance without a pool"
    parser.add_argument("--control", action="store_true", help=text)
    parser.add_argument(
        "--exact",
        choices=WAYS,
        help="time nothing: compare D with an instance that computes the same chunks",
    )
    parser.add_argument(
        "--check-following",
        action="store_true",
        help="fail unless a D that is asked with P loads before P's `done`",
    )


@contextlib.contextmanager
def open_stores(given: argparse.Namespace, scratch: Path) -> Iterator[dict[str, str]]:
    """The stores' URLs by name; what is started for them ends with them."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes())
        for name in given.stores:
            label, has_url, url = name.partition("=")
            if name in PEER_MODES:
                start_service(name, given.pool_size.removesuffix("GiB"), processes)
                processes.wait_ready(_SERVICE_S, lambda text: None)
                urls[name] = name
            elif has_url:
                urls[label] = url
            elif name == "file":
                urls[name] = f"file://{scratch}/files?budget={given.pool_size}"
            elif name == "shm":
                urls[name] = f"shm://bench?size={given.pool_size}&dir={scratch}"
            else:
                urls[name] = stack.enter_context(open_pool(name, processes))
        yield urls


if __name__ == "__main__":
    main()
