"""Campaign: rounds on one stage after the other, each from its number and the seed alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.chaos.asking import Answer, NoAnswerError, ask
from benchmarks.chaos.audit import Audit
from benchmarks.chaos.disk import open_disk
from benchmarks.chaos.engines import Engine
from benchmarks.chaos.injector import Injector
from benchmarks.chaos.plan import Scene, plan_round
from benchmarks.chaos.pools import Pool
from benchmarks.chaos.prompts import make_checkpoint, make_prompts
from benchmarks.chaos.round import Round
from benchmarks.chaos.spawner import Spawner, open_spawner
from benchmarks.chaos.stacks import ALL_POOLS, STACKS
from benchmarks.chaos.stage import Options, Stage, answers_of_one, open_stage
from benchmarks.chaos.tally import Tally

_VARIANTS = (
    Options(),
    Options(mode="concurrent"),
    Options(faulty="seed={seed}&error_rate=0.02&miss_rate=0.05&corrupt_rate=0.05"),
)

_WARM_UP_S = 120.0
_FOR_D = {"do_remote_decode": True}

Say = Callable[[str], None]


class Shape(NamedTuple):
    """The size of a campaign's rounds and stages."""

    round_s: float = 4.0
    rounds_per_stage: int = 8
    num_prompts: int = 40


class Campaign:
    """All rounds of one seed.

    shape: how long a round is, and how many of them a stage has; with the seed it gives the faults.
    engines: each stage draws P's and D's from them.
    first_round: the number of the first round that runs; rounds are numbered from 0.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        seed: int,
        pools: Sequence[str],
        shape: Shape,
        first_round: int,
        say: Say,
        engines: Sequence[Engine],
    ) -> None:
        self._engines = engines
        self._scratch, self._seed, self._pools = scratch, seed, pools
        self._shape, self._say = shape, say
        self._number = first_round
        self._prompts = make_prompts(seed, shape.num_prompts)
        self._answers: dict[Engine, list[Answer]] = {}
        self._model = scratch / "model"
        self._namespace = ""
        self.tally = Tally()

    async def run(self, seconds: float, num_stages: int | None = None) -> None:
        """Runs rounds until the time or `num_stages` is up; a round that has begun is finished."""
        first = self._engines[0]
        make_checkpoint(self._model, first.head_dim)
        with open_spawner(self._scratch, self._model, first.name) as spawner:
            for engine in self._engines:
                answers = await answers_of_one(spawner, self._model, self._prompts, engine)
                self._answers[engine] = answers
                self._say(f"one instance has answered {len(self._prompts)} prompts")
            deadline = time.monotonic() + seconds
            stages = itertools.count() if num_stages is None else range(num_stages)
            for _ in stages:
                await self._run_stage(spawner, deadline)
                if time.monotonic() > deadline:
                    return

    async def _run_stage(self, spawner: Spawner, deadline: float) -> None:
        index = self._number // self._shape.rounds_per_stage
        kind = self._pools[index % len(self._pools)]
        variant = _VARIANTS[index // len(self._pools) % len(_VARIANTS)]
        seed = f"{self._seed} stage {index}"
        faulty = variant.faulty.format(seed=self._seed + index)
        engine = random.Random(f"{seed} engine").choice(self._engines)
        options = Options(variant.mode, faulty, engine=engine)
        with open_disk(self._scratch / f"disk-{index}") as disk:
            pool = ALL_POOLS[kind](spawner, disk, seed)
            async with open_stage(spawner, pool, self._model, options, seed) as stage:
                said = f"{kind} {options.mode} {engine.options}{options.faulty}"
                self._say(f"stage {index}: {said}")
                audit = Audit(stage, await self._warm_up(stage))
                self.tally.failures += [f"at the start: {each}" for each in await audit.leaks()]
                stop = (index + 1) * self._shape.rounds_per_stage
                await self._run_round(stage, pool, audit)
                while self._number < stop and time.monotonic() < deadline:
                    await self._run_round(stage, pool, audit)
                self.tally.add_stage(kind, audit)

    async def _warm_up(self, stage: Stage) -> str:
        """Asks with as many clients as a round has. Returns the namespace of P and D."""
        deadline = time.monotonic() + _WARM_UP_S
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            while not await self._has_answered(client, stage):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answers in {_WARM_UP_S:g} s, before any fault")
            body = {"prompt": self._prompts[0], "max_tokens": 1, "kv_transfer_params": _FOR_D}
            said = await client.post(stage.url_of("prefill") + "/v1/completions", json=body)
        return str(said.json()["kv_transfer_params"]["pdstore"]["namespace"])

    async def _has_answered(self, client: httpx.AsyncClient, stage: Stage) -> bool:
        """False if a first answer took longer than the router waits for one."""
        some = self._prompts[:8]
        try:
            await asyncio.gather(*(ask(client, stage.url, p, stage.options.engine) for p in some))
        except NoAnswerError:
            return False
        return True

    async def _run_round(self, stage: Stage, pool: Pool, audit: Audit) -> None:
        number, self._number = self._number, self._number + 1
        seed = f"{self._seed} round {number}"
        scene = Scene(
            servers=list(pool.servers),
            links=list(pool.links),
            has_disk=pool.has_disk,
            can_vanish=pool.can_vanish,
            is_slow=pool.is_slow,
            is_sheltered=number % 2 == 1,
            hangs=list(pool.hold_files),
            memory_servers=pool.memory_servers if pool.kind in STACKS else [],
        )
        engine = stage.options.engine
        faults = plan_round(seed, scene, self._shape.round_s, engine.faults_per_s)
        injector = Injector(stage, seed)
        one = Round(stage, injector, self._prompts, self._answers[engine], seed)
        began = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await one.run(faults, self._shape.round_s)
        leaks = [f"leak: {each}" for each in await audit.leaks()]
        failures = one.outcome.failures + leaks
        self.tally.add_round(one.outcome, injector.counts, leaks)
        self._say(
            f"round {number}: {sum(injector.counts.values())} faults, {one.outcome.right} right,"
            f" {one.outcome.loaded} of them loaded, {one.outcome.refused} refused,"
            f" {one.outcome.left} left, slowest {one.outcome.slowest_s:.1f} s,"
            f" healed in {one.outcome.heal_s:.1f} s, calm {one.outcome.calm_s:.1f} s,"
            f" {time.monotonic() - began:.1f} s in all"
        )
        if failures:
            plan = "\n".join(f"  {fault}" for fault in faults)
            self._say(f"FAILED round {number}; its plan:\n{plan}")
            for failure in failures:
                self._say(f"FAILED round {number}: {failure}")
                self.tally.failures.append(f"round {number} ({pool.kind}): {failure}")
