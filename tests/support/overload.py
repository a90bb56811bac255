"""More than a pair can take: 64 requests at a time, with queues and staging far too small.

P, D and the router are processes, the engine is the mini engine, and the queues hold two jobs. What
does not fit is dropped and counted, and computed again: so every answer is compared with one
instance's. The memory of P and D after a tenth of the requests and after all of them tells whether
something piles up.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.asking import Answer, NoAnswerError, ask
from benchmarks.chaos.disk import open_disk
from benchmarks.chaos.pools import POOLS
from benchmarks.chaos.prompts import make_checkpoint, make_prompts
from benchmarks.chaos.spawner import open_spawner
from benchmarks.chaos.stage import Options, Stage, answers_of_one, open_stage, tail_of

_TIGHT = Options(
    env={"PDSTORE_WORKERS": "2", "PDSTORE_STAGING": "256KiB"},
    arguments=("--max-jobs", "2"),
    router=("--prefill-timeout", "120", "--read-timeout", "120"),
    is_direct=True,
)
_NUM_PROMPTS = 100
_TIMEOUT_S = 300.0


class Overload:
    """One run.

    asked_at_once: requests in flight at any time.
    """

    def __init__(
        self,
        stage: Stage,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        asked_at_once: int,
    ) -> None:
        self._stage, self._prompts, self._answers = stage, prompts, answers
        self._asked_at_once = asked_at_once
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._numbers: list[int] = []

    async def run(self, num_requests: int) -> dict[str, Any]:
        """Asks `num_requests` times. Returns the run's numbers: answers, times, memory, jobs."""
        await self._ask_all(num_requests // 10)
        early = self._peak_mib()
        began = time.monotonic()
        await self._ask_all(num_requests - num_requests // 10)
        seconds = sorted(self._seconds)
        return {
            "requests": num_requests,
            "asked_at_once": self._asked_at_once,
            **{name: self._counts[name] for name in ("right", "loaded", "wrong", "lost")},
            "requests_per_s": round(0.9 * num_requests / (time.monotonic() - began), 1),
            "answer_s": {
                "median": round(statistics.median(seconds), 2),
                "p99": round(seconds[int(0.99 * len(seconds))], 2),
                "most": round(seconds[-1], 2),
            },
            "peak_mib_after_a_tenth": early,
            "peak_mib": self._peak_mib(),
            **{name: await self._told_by(name) for name in ("prefill", "decode")},
        }

    async def _ask_all(self, count: int) -> None:
        self._numbers = [n % len(self._prompts) for n in range(count)]
        # a connection that is kept may be closed by the other side as it is used again
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client) for _ in range(self._asked_at_once)))

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while self._numbers:
            number = self._numbers.pop()
            began = time.monotonic()
            try:
                answer = await ask(client, self._stage.url, self._prompts[number])
            except (NoAnswerError, httpx.TimeoutException) as error:
                print(f"lost: {error!r}", file=sys.stderr)
                print(tail_of(self._stage.children["router"].log), file=sys.stderr)
                self._counts["lost"] += 1
                continue
            self._seconds.append(time.monotonic() - began)
            is_right = answer.is_like(self._answers[number])
            self._counts["right" if is_right else "wrong"] += 1
            self._counts["loaded"] += answer.num_loaded > 0

    def _peak_mib(self) -> dict[str, int]:
        return {name: child.peak_bytes >> 20 for name, child in self._stage.children.items()}

    async def _told_by(self, name: str) -> dict[str, Any]:
        """Returns an instance's own counts of its jobs, and how long the longest took at most."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            text = (await client.get(self._stage.url_of(name) + "/metrics")).text
        direction = "save" if name == "prefill" else "load"
        jobs: dict[str, int] = {}
        buckets: dict[float, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("direction") != direction:
                    continue
                if sample.name == "pdstore_jobs_total":
                    jobs[sample.labels["outcome"]] = int(sample.value)
                elif sample.name == "pdstore_job_seconds_bucket":
                    buckets[float(sample.labels["le"])] = sample.value
        return {f"{direction}s": jobs, f"{direction}_s": _quantiles(buckets)}


def _quantiles(buckets: dict[float, float]) -> dict[str, float]:
    """Returns the upper bounds of the buckets with the median, the 99th percentile and the end.

    buckets: for each upper bound, how many were at most so long, as Prometheus counts them.
    """
    ends = sorted(buckets)
    total = buckets[ends[-1]] if ends else 0.0
    shares = {"median_below": 0.5, "p99_below": 0.99, "all_below": 1.0}
    return {
        name: next((end for end in ends if buckets[end] >= share * total), 0.0)
        for name, share in shares.items()
    }


async def measure(scratch: Path, num_requests: int, asked_at_once: int) -> dict[str, Any]:
    """Runs a pair over files and overloads it."""
    model = scratch / "model"
    make_checkpoint(model)
    prompts = make_prompts(0, _NUM_PROMPTS)
    with open_spawner(scratch, model) as spawner, open_disk(scratch / "disk") as disk:
        answers = await answers_of_one(spawner, model, prompts)
        pool = POOLS["file"](spawner, disk, "")
        async with open_stage(spawner, pool, model, _TIGHT, "") as stage:
            return await Overload(stage, prompts, answers, asked_at_once).run(num_requests)
