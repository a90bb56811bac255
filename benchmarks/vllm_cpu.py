"""vLLM on a CPU, side by side: no connector, pdstore, and vLLM's own MooncakeStoreConnector.

    .venv-vllm/bin/python -m benchmarks.vllm_cpu --model DIR [--requests 40] [--json FILE]

Three P/D pairs of `vllm serve` behind three plain proxies, both connectors on one Mooncake.
Requests alternate between the pairs: first one at a time, then four at a time. Then what a miss
costs, and what the connector costs a step of the scheduler when it has nothing to do.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from examples.demo.client import Answer, ask, counters, is_healthy
from examples.demo.mooncake_pool import start_mooncake
from examples.demo.processes import Processes
from examples.ports import free_ports

NONE, OURS, THEIRS = "none", "pdstore", "MooncakeStoreConnector"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_MAX_TOKENS = 4
_READY_S = 400.0


class Pair:
    """P, D and a proxy, with one connector or none."""

    def __init__(self, processes: Processes, connector: str, model: Path, pool: str) -> None:
        self.connector = connector
        ports = free_ports(3)
        p, d, self.url = (f"http://127.0.0.1:{port}" for port in ports)
        self.decode_url = d
        for role, port in zip(("prefill", "decode"), ports, strict=False):
            command = [sys.executable, "-m", "examples.vllm_serve", "--tiny", "--role", role]
            command += ["--model", str(model), "--port", str(port), *_options(connector, role)]
            url = f"http://127.0.0.1:{port}"
            env = _environment(connector, pool, port)
            name = f"{connector}-{role}"
            processes.start(name, command, partial(is_healthy, url), env)
        proxy = [sys.executable, "-m", "examples.plain_proxy", "--port", str(ports[2])]
        proxy += ["--prefill", p, "--decode", d]
        processes.start(f"{connector}-proxy", proxy, partial(is_healthy, self.url))

    def computed(self) -> float:
        """Returns the prompt tokens that D has computed so far."""
        return counters(self.decode_url).get("vllm:prompt_tokens_by_source_total:local_compute", 0)


def _options(connector: str, role: str) -> list[str]:
    if connector != THEIRS:
        return []
    config = {
        "kv_connector": THEIRS,
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": "recompute",
    }
    return ["--kv-transfer-config", json.dumps(config)]


def _environment(connector: str, pool: str, port: int) -> dict[str, str]:
    env = {**os.environ, "PDSTORE_STAGING": "256MiB", "VLLM_PORT": str(port + 1)}
    if connector == OURS:
        return env | {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": pool}
    if connector == THEIRS:
        address = pool.partition("://")[2].partition("?")[0]
        path = Path(tempfile.mkdtemp()) / "mooncake.json"
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": address,
            "protocol": "tcp",
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
        }
        path.write_text(json.dumps(config))
        return env | {"MOONCAKE_CONFIG_PATH": str(path)}
    return env


def measure(pairs: Sequence[Pair], num_requests: int, num_tokens: int, width: int) -> list[Any]:
    """Asks each pair for the same load, in turns of `width` requests."""
    took = dict.fromkeys((pair.connector for pair in pairs), 0.0)
    before = {pair.connector: pair.computed() for pair in pairs}
    answers: dict[str, list[Answer]] = {pair.connector: [] for pair in pairs}
    with ThreadPoolExecutor(width) as threads:
        for _ in range(num_requests // width):
            for pair in pairs:
                prompts = [_prompt(num_tokens) for _ in range(width)]
                begin = time.monotonic()
                asked = threads.map(lambda p, url=pair.url: ask(url, p, _MAX_TOKENS), prompts)
                answers[pair.connector] += asked
                took[pair.connector] += time.monotonic() - begin
    return [
        {
            "connector": pair.connector,
            "at_a_time": width,
            "requests": num_requests,
            "prompt_tokens": num_requests * num_tokens,
            "computed_by_d": pair.computed() - before[pair.connector],
            "total_s": round(took[pair.connector], 3),
            **_times([answer.ttft_s for answer in answers[pair.connector]]),
        }
        for pair in pairs
    ]


def measure_misses(pairs: Sequence[Pair], num_requests: int, num_tokens: int) -> list[Any]:
    """Asks D directly for prompts that are not stored."""
    ttft: dict[str, list[float]] = {pair.connector: [] for pair in pairs}
    for _ in range(num_requests):
        for pair in pairs:
            answer = ask(pair.decode_url, _prompt(num_tokens), 1)
            ttft[pair.connector].append(answer.ttft_s)
    return [{"connector": name, "misses": num_requests, **_times(t)} for name, t in ttft.items()]


def _times(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {
        "ttft_median_ms": round(1e3 * statistics.median(ordered), 2),
        "ttft_p95_ms": round(1e3 * p95, 2),
    }


def _prompt(num_tokens: int) -> list[int]:
    return [random.randrange(256) for _ in range(num_tokens)]


def measure_steps(model: Path, pool: str) -> list[Any]:
    """Measures the scheduler's seconds a step of 8 decoding requests, twice each, in turns."""
    results = []
    for connector in (NONE, OURS, NONE, OURS):
        env = _environment(connector, pool, 20000) | {"PDSTORE_ROLE": "both"}
        command = [sys.executable, "-m", "benchmarks.vllm_steps", str(model)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        results.append({"connector": connector, **json.loads(done.stdout.splitlines()[-1])})
    return results


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=900)
    given = parser.parse_args()
    results: dict[str, Any] = {"model": given.model.name}
    with Processes() as processes:
        pool = start_mooncake(processes)
        results["steps"] = _show(measure_steps(given.model, pool))
        pairs = [Pair(processes, name, given.model, pool) for name in (NONE, OURS, THEIRS)]
        processes.wait_ready(_READY_S, lambda text: None)
        measure(pairs, 2, given.tokens, 1)  # warm
        for width in (1, 4):
            rows = measure(pairs, given.requests, given.tokens, width)
            results[f"handoff_{width}"] = _show(rows)
        results["misses"] = _show(measure_misses(pairs[:2], given.requests, given.tokens))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def _show(rows: list[Any]) -> list[Any]:
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


if __name__ == "__main__":
    main()
