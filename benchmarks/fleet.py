"""Simulates the load of a fleet of instances on its store: calls and bytes a second.

    python -m benchmarks.fleet TRACE [--instances 1000] [--json benchmarks/results/fleet.json]

Half of the instances are P and half D. The requests are a trace's, as many as keep P busy for a
part of the time; the calls of a hand-off are counted on a pool of tiny values with the blocks, the
layer ranges and the shares of the real ones; the seconds of a prefill are measured ones.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report
from benchmarks.trace.replay import Clock, Fleet
from benchmarks.trace.requests import read_trace
from pdstore.format.layout import LayerSpec, Layout
from pdstore.metrics import Metrics
from pdstore.scheduler.prefix_cache import PrefixCacheManager
from pdstore.settings import read_settings
from pdstore.store.guard import GuardedStore
from pdstore.store.memory import MemoryStore
from pdstore.store.transfer import RANGE_BYTES
from pdstore.worker.pool import KVPool

TOKEN_BYTES = 32 * 8 * 128 * 2 * 2  # KV of an 8B Llama in bf16
PREFILL_S = [(0, 0.0), (1024, 0.030), (8192, 0.211), (32_768, 1.256), (65_536, 3.434)]
"""Measured: 8B shape, vLLM, one H200 (h200_vllm_files.json, h200_x2_handoff.json)."""
LENGTHS = (512, 4096, 16_384)
RANGES = 4
HEAD_DIM = 128  # of one head, so that a value is a 32nd of the real one
VERBS = ("match", "get", "put")
COLUMNS = [
    *("instances", "prompt tokens/s", "requests/s", "saved, GB/s", "loaded, GB/s"),
    *(f"{verb} calls/s" for verb in VERBS),
]


class Handoff(NamedTuple):
    """The calls of the store that one hand-off makes on both sides together."""

    num_tokens: int
    calls: Counter[str]


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--busy", type=float, default=0.7, help="part of the time that P computes")
    parser.add_argument("--requests", type=int, help="use this many of the trace's requests")
    given = parser.parse_args()
    run(lambda: simulate(given), given.json)


def simulate(given: argparse.Namespace) -> Report:
    """Adds up the trace's requests, of which each P takes as many as it has time for."""
    handoffs = [count_calls(num_tokens) for num_tokens in LENGTHS]
    clock, calls = Clock(), dict.fromkeys(VERBS, 0.0)
    fleet = Fleet(clock, 1, None, is_shared=True, lag_s=10)
    seconds, count = 0.0, 0
    for request in read_trace(given.trace, given.requests):
        clock.now_s = request.at_s
        found = fleet.hits.num_found
        fleet.ask(fleet.keys(request.token_ids))
        found = fleet.hits.num_found - found
        seconds += between(PREFILL_S, request.num_tokens) - between(PREFILL_S, found)
        for verb in VERBS:
            points = [(handoff.num_tokens, handoff.calls[verb]) for handoff in handoffs]
            calls[verb] += between(points, request.num_tokens)
        count += 1
    fleet.close()
    hits = fleet.hits
    per_second = given.busy / seconds  # of all these requests, on one P
    report = Report(
        f"{given.trace.name}: {count} requests, {hits.percent:.1f} % of their tokens found,"
        f" P busy for {100 * given.busy:.0f} % of the time",
        COLUMNS,
        notes=[f"{h.num_tokens} tokens: {dict(h.calls)}" for h in handoffs],
    )
    saved, loaded = hits.num_tokens - hits.num_found, hits.num_tokens + hits.num_found
    for instances in (2, given.instances):
        rate = per_second * instances / 2
        report.add(
            instances,
            hits.num_tokens * rate,
            count * rate,
            saved * TOKEN_BYTES * rate / 1e9,
            loaded * TOKEN_BYTES * rate / 1e9,
            *(calls[verb] * rate for verb in VERBS),
        )
    return report


def count_calls(num_tokens: int) -> Handoff:
    """Hands a prompt over and counts the calls of the store, by verb."""
    settings = read_settings(store="memory://", layer_ranges=RANGES, staging="32MiB", native="off")
    layer = LayerSpec(num_kv_heads=1, head_dim=HEAD_DIM)
    layout = Layout.of(
        settings, dtype="float32", layers=[layer] * RANGES, engine_block_tokens=64, rope=""
    )
    namespace = layout.namespace(settings, weights="fleet")
    block_ids = range(-(-num_tokens // 64))
    caches = [torch.zeros(len(block_ids), 64, 1, 2 * HEAD_DIM) for _ in range(RANGES)]
    scale = TOKEN_BYTES * 64 // (RANGES * 64 * 2 * HEAD_DIM * 4)
    metrics = Metrics()
    store = GuardedStore(MemoryStore(), metrics)
    cache = PrefixCacheManager(settings, namespace, store=store)
    pool = KVPool(
        settings, layout, caches, namespace, store=store, range_bytes=RANGE_BYTES // scale
    )
    keys = cache.keys(range(num_tokens))
    cache.lookup(keys).wait(10)
    handoff, params = cache.announce(keys)
    pool.save(keys, block_ids, handoff=handoff).wait(60)
    found = cache.lookup(keys, params).wait(10)
    loaded = pool.load(found.keys, block_ids).wait(60)
    assert loaded.num_tokens == num_tokens, loaded
    value = metrics.registry.get_sample_value
    labels = [{"verb": verb, "outcome": "ok"} for verb in VERBS]
    counts = [value("pdstore_store_calls_total", label) or 0.0 for label in labels]
    pool.close()
    cache.close()
    return Handoff(num_tokens, Counter({v: int(n) for v, n in zip(VERBS, counts, strict=True)}))


def between(points: Sequence[tuple[int, float]], x: int) -> float:
    """Returns the y of x on the line through the two nearest points."""
    i = min(max(1, bisect_left(points, (x, 0.0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


if __name__ == "__main__":
    main()
