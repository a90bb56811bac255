"""Serves many users with each KV connector in turn: what they wait for, and what is served.

    python -m benchmarks.load --cpu                                   # a minute, the mini engine
    python -m benchmarks.load --engine vllm --workload turns --kinds plain simple shm --json FILE

Each kind is started alone, warmed up, and measured in windows; the order of the kinds is drawn.
Several workloads, or --rates, follow one another on the same servers.
With --anew each window has new servers and an empty pool, and the kinds take turns.
With --beside all kinds are started at once, where the GPU and the host have the memory, and their
windows take turns, so that a slow minute of the machine meets them all. Rows are comparable within
one run. `shm@TREE` is a kind of pdstore from another checkout, which --trees names;
`shm+PDSTORE_WORKERS=4` has settings. Behind `--` come the engine's own options.

Kinds: `plain` has no pool, `ceiling` all KV in the GPU; `native` and `simple` are vLLM's own
offloads, `lmcache` its server; `shm`, `shm_prompts` (no answers saved), `shm_auto`, `shm_events`
(it publishes KV events) and `files` are one instance with pdstore; `relayed` and `concurrent` are
P and D, `nixl` and `lmcache_pd` too, of others; `two` are two instances with one pool behind a
router, and `two_affinity` behind one that sends a prompt where its prefix went before.
`tiers` is `shm` with files on a disk below it, and `lmcache_disk` is `lmcache` with the same;
`tiers_direct` and `lmcache_direct` read and write the files past the page cache. Each of the four
keeps at most --disk-gib below --disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.command import parser_of, run
from benchmarks.load.kinds import kinds
from benchmarks.load.measure import disk_of, measure, sizes_of
from benchmarks.load.workloads import WORKLOADS, Sizes, turns
from benchmarks.shapes import SHAPES
from examples.demo.processes import stop_on_signals


def main() -> None:
    stop_on_signals()
    given = _parse()
    replayed = [name for name in given.workload if WORKLOADS[name].needs_trace]
    if replayed and given.trace is None:
        print(f"skipped without a trace, which --trace FILE names: {', '.join(replayed)}")
        return
    _refuse_wrong(given)
    run(lambda: measure(given), given.json)


def _refuse_wrong(given: argparse.Namespace) -> None:
    """Exits with a line that says what to change, if the options do not fit together."""
    if given.json is not None and "load" not in given.json.name:
        sys.exit("--json: a name with `load` in it, so that results are found together")
    known = kinds(given.pool, Sizes(), {}, disk_of(given))
    for name in given.kinds:
        what, _, tree = name.partition("+")[0].partition("@")
        if what not in known:
            sys.exit(f"{what}: no such kind; there are {', '.join(known)}")
        if tree and tree not in given.trees:
            sys.exit(f"--kinds {name}: --trees names no {tree}")
    _refuse_wrong_sizes(sizes_of(given))
    peers = [name for name in given.kinds if name.startswith(("lmcache", "nixl"))]
    if given.beside and len(peers) != len({name[:4] for name in peers}):
        sys.exit(f"--kinds: {' and '.join(peers)} would use the same ports")


def _refuse_wrong_sizes(sizes: Mapping[str, Sizes]) -> None:
    if len({(each.gpu, each.pool_gib) for each in sizes.values()}) > 1:
        sys.exit("--workload: these need other sizes of cache or pool; give --gpu and --pool-gib")
    for what, each in sizes.items():
        if WORKLOADS[what].run is turns and each.document > each.room:
            room = f"{what} has room for {max(0, each.room)} tokens"
            sys.exit(f"--document: {room} beside --questions {each.turns}")


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=None)
    add = parser.add_argument
    add("--cpu", action="store_true", help="a tiny model and a sixteenth of the lengths")
    add("--engine", choices=("mini", "vllm"), help="default: mini with --cpu, else vllm")
    add("--model", default="llama-8b", help=f"of vLLM: {', '.join(SHAPES)}, or a directory")
    add("--workload", nargs="+", choices=tuple(WORKLOADS), default=["turns"], metavar="NAME")
    add("--kinds", nargs="+", default=["plain", "shm", "files"])
    add("--windows", type=int, default=3)
    add("--window", type=float, metavar="S", help="default: 60, with --cpu 5")
    add("--warm", type=float, metavar="S", help="before the first window; default: 15, 3")
    add("--beside", action="store_true", help="start all kinds at once; windows take turns")
    add("--again", type=float, metavar="S", default=8.0, help="before a later window of --beside")
    add("--anew", action="store_true", help="start the servers anew for each window; in turns")
    add("--rates", type=float, nargs="+", help="arrivals a second, of open loops")
    add("--gpus", nargs="+", default=[], help="as CUDA_VISIBLE_DEVICES names them: of P, of D")
    add("--users", type=int, help="who ask at once")
    add("--vocabulary", type=int, help="token ids are below it")
    add("--document", type=int, help="tokens that a user brings along, the median")
    add("--questions", type=int, dest="turns", help="of one user, who then leaves")
    add("--pool-gib", type=float, help="size of the host pool")
    add("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    add("--disk-gib", type=float, help="of each kind with a disk; default: 4 times its host pool")
    add("--copy", default="", metavar="RATE", help="at which `tiers` copy down; default: pdstore's")
    add("--gpu", type=int, help="tokens of KV that fit into the engine's own cache")
    add("--trace", type=Path, metavar="FILE", help="of the Mooncake release")
    add("--trees", type=_pair, nargs="+", default=[], metavar="NAME=DIR", help="checkouts")
    add("--pool", type=Path, default=Path("/dev/shm"), help="a directory in memory")
    add("--seed", type=int, default=1)
    add("--order", type=int, help="seed of the order of the kinds; default: another each time")
    add("--start-seconds", type=float, default=240)
    add("options", nargs="*", help="of the engine, behind --")
    given = parser.parse_args()
    given.engine = given.engine or ("mini" if given.cpu else "vllm")
    given.window = given.window or (5.0 if given.cpu else 60.0)
    given.warm = given.warm if given.warm is not None else (3.0 if given.cpu else 15.0)
    given.trees = dict(given.trees)
    return given


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    main()
