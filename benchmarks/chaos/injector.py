"""Injector: makes the faults of a plan happen, and keeps count of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

from benchmarks.chaos.plan import INSTANCES, Fault
from benchmarks.chaos.proxy import Mode
from benchmarks.chaos.spawner import Child
from benchmarks.chaos.stage import Stage

_GRACE_S = 2.5  # how long a router may go on without an instance that is back


class Injector:
    """Hurts one stage.

    counts: faults that happened, by kind and target.
    leaving: set for a moment: then all clients leave before their answers.
    """

    def __init__(self, stage: Stage, seed: str) -> None:
        self._stage, self._random = stage, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.leaving = asyncio.Event()
        self._costly: list[tuple[float, float]] = []

    async def run(self, faults: Sequence[Fault]) -> None:
        """Makes all faults happen at their times; returns when the last one is over."""
        began = time.monotonic()
        await asyncio.gather(*(self._happen(fault, began) for fault in faults))

    def may_have_cost(self, began: float, ended: float) -> bool:
        """True if a fault that may cost an answer was there between these times, or just before."""
        return any(start < ended and began < end + _GRACE_S for start, end in self._costly)

    async def _happen(self, fault: Fault, began: float) -> None:
        await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
        start = time.monotonic()
        if fault.may_cost_answers:
            self._costly.append((start, start + fault.for_s + 60))  # open until it is over
        if await self._do(fault):
            self.counts[f"{fault.kind} {fault.target}"] += 1
        if fault.may_cost_answers:
            self._costly.remove((start, start + fault.for_s + 60))
            self._costly.append((start, time.monotonic()))

    async def _do(self, fault: Fault) -> bool:
        """Makes a fault happen, and ends it. Returns False if it could not."""
        if fault.kind in ("kill", "stop"):
            return await self._hurt_process(fault)
        for targets, hurt in (
            (self._stage.links, self._hurt_link),
            (self._stage.pool.memory_servers, self._hurt_memory),
            (self._stage.pool.hold_files, self._hang),
        ):
            if fault.target in targets:
                return await hurt(fault)
        if fault.kind == "clock":
            hours = self._random.choice((-24.0, -1.0, 0.01, 1.0, 24.0))
            self._stage.clocks[fault.target].shift(3600 * hours)
            await asyncio.sleep(fault.for_s)
            self._stage.clocks[fault.target].shift(0.0)
        elif fault.kind == "fill":
            self._stage.pool.disk.fill(self._random.choice((0, 4096, 1 << 18)))
            await asyncio.sleep(fault.for_s)
            self._stage.pool.disk.empty()
        elif fault.kind == "vanish":
            return self._stage.pool.vanish()
        elif fault.kind == "leave":
            self.leaving.set()  # wakes the clients that wait at this moment
            self.leaving.clear()
        return True

    async def _hurt_process(self, fault: Fault) -> bool:
        child = self._child(fault.target)
        if not child.is_alive or child.is_stopped:
            return False  # another fault holds this process
        if fault.kind == "stop":
            child.stop()
            await asyncio.sleep(fault.for_s)
            child.go_on()
            return True
        child.kill()
        await asyncio.sleep(fault.for_s)
        if fault.target in INSTANCES:
            self._stage.start(fault.target)
            with contextlib.suppress(TimeoutError):  # another fault has killed it
                await self._stage.ready_again(fault.target)
        else:
            self._stage.pool.restart(fault.target)
        return True

    async def _hang(self, fault: Fault) -> bool:
        file = self._stage.pool.hold_files[fault.target]
        if file.exists():
            return False  # it hangs already
        file.touch()
        await asyncio.sleep(fault.for_s)
        file.unlink(missing_ok=True)
        return True

    async def _hurt_memory(self, fault: Fault) -> bool:
        pool = self._stage.pool
        if not await pool.order(fault.target, fault.kind):
            return False
        if fault.kind == "fill":
            await asyncio.sleep(fault.for_s)
            await pool.order(fault.target, "drain")
        return True

    def _child(self, name: str) -> Child:
        return {**self._stage.children, **self._stage.pool.servers}[name]

    async def _hurt_link(self, fault: Fault) -> bool:
        link = self._stage.links[fault.target]
        if fault.kind == "cut":
            link.cut()
            return True
        await link.be(cast("Mode", fault.kind))
        await asyncio.sleep(fault.for_s)
        await link.be("pass")
        if fault.kind in ("hold", "half") and self._random.random() < 0.3:
            link.cut()  # else what was held comes late
        return True
