"""Audit: finds what a round has not given back: requests, blocks, slots, threads, fds, keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.plan import INSTANCES
from benchmarks.chaos.spawner import Child
from benchmarks.chaos.stage import Stage
from pdstore.errors import StoreError

_BACK_S = 15.0
_MORE_FDS = 20  # connections that are kept for a while: the router's, the store's, the clients'
_NUM_STORES = 4  # P and D open one for lookups and one for jobs
_BREAKERS = 2
"""Threads that probe the store: each half of an instance starts one when its store first fails."""


class Footprint(NamedTuple):
    """The threads and file descriptors of a process."""

    num_threads: int
    num_fds: int

    @classmethod
    def of(cls, child: Child) -> Footprint:
        return cls(child.num_threads, child.num_fds)


class Audit:
    """Looks at one stage after each round.

    in_process: faults that `faulty+` made, by kind; those of killed instances since their last
      audit are missing.
    peak_bytes: the most memory that each instance ever had.
    """

    def __init__(self, stage: Stage, namespace: str) -> None:
        self._stage, self._namespace = stage, namespace
        self._first: dict[int, Footprint] = {}
        self._codes: dict[int, dict[str, float]] = {}
        self.peak_bytes: dict[str, int] = {}

    @property
    def in_process(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for codes in self._codes.values():
            for code, count in codes.items():
                total[code] = total.get(code, 0) + int(count)
        return total

    async def leaks(self) -> list[str]:
        """Returns what is still held some seconds after the round, in words."""
        deadline = time.monotonic() + _BACK_S
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while (found := await self._look(client)) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        for name, child in self._stage.children.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), child.peak_bytes)
            self._first.setdefault(child.pid, Footprint.of(child))
        return found or await self._leaks_of_pool()

    async def _look(self, client: httpx.AsyncClient) -> list[str]:
        found: list[str] = []
        for name in INSTANCES:
            child = self._stage.children[name]
            first, now = self._first.get(child.pid), Footprint.of(child)
            late = self._stage.pool.late_threads + self._stage.options.engine.most_threads
            late += _BREAKERS
            if first is not None and now.num_threads > first.num_threads + late:
                found.append(f"{name}: {now.num_threads} threads, {first.num_threads} before")
            more_fds = _MORE_FDS + self._stage.pool.late_fds
            if first is not None and now.num_fds > first.num_fds + more_fds:
                found.append(f"{name}: {now.num_fds} fds, {first.num_fds} before")
                if name == "router":
                    await self._ask_router(client)
            if name != "router":
                found += await self._busy(client, name, child.pid)
        return found

    async def _ask_router(self, client: httpx.AsyncClient) -> None:
        """Asks once: httpx drops the connections that were idle for too long at the next call."""
        body, url = {"prompt": [1], "max_tokens": 1}, self._stage.url_of("router")
        with contextlib.suppress(httpx.HTTPError):
            await client.post(f"{url}/v1/completions", json=body)

    async def _busy(self, client: httpx.AsyncClient, name: str, pid: int) -> list[str]:
        """Returns the gauges that are not those of an idle engine."""
        found: list[str] = []
        if self._stage.options.engine.tells_by_steps:
            body = {"prompt": [1], "max_tokens": 8, "ignore_eos": True}
            await client.post(self._stage.url_of(name) + "/v1/completions", json=body)
        text = (await client.get(self._stage.url_of(name) + "/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                wanted = self._stage.options.engine.idle.get(sample.name)
                if wanted is not None and sample.value != wanted:
                    found.append(f"{name}: {sample.name}{sample.labels} is {sample.value:g}")
                if sample.name == "pdstore_store_codes_total":
                    code = sample.labels["code"]
                    if code.startswith("faulty"):
                        self._codes.setdefault(pid, {})[code] = sample.value
        return found

    async def _leaks_of_pool(self) -> list[str]:
        """Clears the namespace and returns what is left in the pool."""
        deadline, found = time.monotonic() + _BACK_S, ["the pool cannot be cleared"]
        while found and time.monotonic() < deadline:
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._clear)
                found = await self._stage.pool.leftovers(_NUM_STORES)
            await asyncio.sleep(0.05 if found else 0.0)
        return found

    def _clear(self) -> None:
        with contextlib.closing(self._stage.pool.open_store()) as store:
            store.clear(self._namespace)
