"""Workloads: questions, their lengths and their times, all drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.client import Client
from benchmarks.trace.requests import TRACE_BLOCK, TraceRequest, read_trace


@dataclass(frozen=True)
class Sizes:
    """Sizes of a workload and of the instance that serves it. Lengths are tokens.

    users: who ask at once, in a closed loop.
    document: the median of what each user brings along, behind `system`, which all share.
    gpu: tokens of KV that the engine's own cache holds. pool_gib: of the host pool.
    rate: arrivals a second, of an open loop.
    shrunk: a small engine serves it: lengths are divided by so much.
    """

    users: int = 32
    turns: int = 6
    document: int = 6000
    system: int = 1024
    question: tuple[int, int] = (128, 512)
    answer: int = 128
    think_s: tuple[float, float] = (0.5, 3.0)
    longest: int = 32_000
    gpu: int = 131_072
    pool_gib: float = 56.0
    rate: float = 1.8
    vocabulary: int = 128_256

    @property
    def room(self) -> int:
        """The tokens that a document may have, if all questions are to fit behind it."""
        return self.longest - self.system - self.turns * (self.question[1] + self.answer)

    def shrunk(self) -> Sizes:
        """Returns the form for a tiny model on a CPU: a sixteenth of the lengths."""
        low, high = self.question
        return replace(
            self,
            users=max(2, self.users // 8),
            document=self.document // 16,
            system=self.system // 16,
            question=(low // 16, high // 16),
            answer=max(4, self.answer // 16),
            think_s=(0.05, 0.3),
            longest=self.longest // 16,
            gpu=self.gpu // 16,
            pool_gib=self.pool_gib / 512,
            vocabulary=4096,
        )


class Plan(NamedTuple):
    """The source of a run's prompts."""

    sizes: Sizes
    seed: int
    trace: Path | None

    def tokens(self, count: int, *seed: object) -> list[int]:
        """Draws token ids; equal seeds give equal ids."""
        draw = random.Random(repr((self.seed, *seed)))
        return draw.choices(range(10, self.sizes.vocabulary - 10), k=count)

    def requests(self) -> list[TraceRequest]:
        """Returns the trace's requests that the engine can take."""
        assert self.trace is not None
        most = self.sizes.longest
        return [r for r in read_trace(self.trace) if 256 <= r.num_tokens <= most]


Run = Callable[[Client, Plan], Coroutine[Any, Any, None]]
"""Asks until it is cancelled."""


async def turns(client: Client, plan: Plan) -> None:
    """Users in a closed loop: each brings a document and asks several questions about it.

    Then that user leaves, and another one comes.
    """
    sizes, serial = plan.sizes, iter(range(1 << 30))
    system = plan.tokens(sizes.system, "system")

    async def user(slot: int) -> None:
        await asyncio.sleep(0.1 * slot)
        while True:
            name = next(serial)
            draw = random.Random(repr((plan.seed, name)))
            length = int(draw.lognormvariate(math.log(sizes.document), 0.5))
            history = system + plan.tokens(min(length, sizes.room), name)
            for turn in range(sizes.turns):
                history += plan.tokens(draw.randint(*sizes.question), name, turn)
                history += await client.ask(history, sizes.answer, turn)
                await asyncio.sleep(draw.uniform(*sizes.think_s))

    await _all(user(slot) for slot in range(sizes.users))


async def agent(client: Client, plan: Plan) -> None:
    """Jobs that arrive at a rate: each calls the model again and again with all it has seen."""
    sizes = plan.sizes

    async def job(number: int) -> None:
        history: list[int] = []
        for turn in range(sizes.turns):
            more = min(sizes.document, sizes.longest - len(history) - sizes.answer)
            history += plan.tokens(max(1, more), number, turn)
            history += await client.ask(history, sizes.answer, turn)

    await _arriving(client, plan, job)


async def convoy(client: Client, plan: Plan) -> None:
    """Users who all ask at once, with one long prefix; then the next ones, with another."""
    sizes, number, pause_s = plan.sizes, 0, plan.sizes.think_s[0]
    while True:
        shared = plan.tokens(sizes.document, "convoy", number)
        prompts = [
            shared + plan.tokens(sizes.question[0], number, user) for user in range(sizes.users)
        ]
        await _all(client.ask(prompt, sizes.answer) for prompt in prompts)
        number += 1
        await asyncio.sleep(pause_s)


async def reload(client: Client, plan: Plan) -> None:
    """One user, two documents, and room in the GPU for one of them.

    A document's first question finds it in the pool, the next one in the GPU.
    """
    documents = [plan.tokens(plan.sizes.document, number) for number in range(2)]
    for document in itertools.cycle(documents):
        for turn in range(2):
            await client.ask(document, plan.sizes.answer, turn)


async def pd(client: Client, plan: Plan) -> None:
    """Prompts of a trace's lengths that share nothing, arriving at a rate."""
    lengths = [request.num_tokens for request in plan.requests()]

    async def one(number: int) -> None:
        length = random.Random(repr((plan.seed, number))).choice(lengths)
        await client.ask(plan.tokens(length, number), plan.sizes.answer)

    await _arriving(client, plan, one)


async def trace(client: Client, plan: Plan) -> None:
    """A trace's requests at the trace's times; its hash ids say what prompts share."""
    async with _started() as start:
        for request in plan.requests():
            await asyncio.sleep(max(0.0, request.at_s - client.now))
            prompt = [
                token
                for block in request.blocks
                for token in plan.tokens(TRACE_BLOCK, "block", block)
            ]
            most = max(1, min(request.num_decoded, plan.sizes.answer))
            start(client.ask(prompt[: request.num_tokens], most))
        await asyncio.Event().wait()


async def _arriving(
    client: Client, plan: Plan, work: Callable[[int], Coroutine[Any, Any, None]]
) -> None:
    """Starts one after the other at random times, `rate` a second, while questions are taken."""
    draw = random.Random(repr((plan.seed, "arrivals")))
    async with _started() as start:
        for number in itertools.count():
            await client.gate.wait()
            start(work(number))
            await asyncio.sleep(draw.expovariate(plan.sizes.rate))


@contextlib.asynccontextmanager
async def _started() -> AsyncIterator[Callable[[Coroutine[Any, Any, Any]], None]]:
    """Gives a function that starts work; what has not ended at the end is cancelled."""
    tasks: set[asyncio.Task[Any]] = set()
    try:
        yield lambda work: tasks.add(asyncio.create_task(work))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all(work: Any) -> None:
    await asyncio.gather(*work)


class Workload(NamedTuple):
    """A workload and its sizes.

    is_open: its prompts arrive at a rate. needs_trace: it cannot run without --trace.
    """

    run: Run
    sizes: Sizes
    is_open: bool = False
    needs_trace: bool = False


_AGENT = Sizes(turns=8, document=2000, answer=20, longest=13_000, rate=3.0)
_LEAVE = Sizes(users=48, turns=4, document=12_000, pool_gib=48.0)  # half their KV
_RELOAD = Sizes(document=8192, answer=4, longest=8400, gpu=9600, pool_gib=8.0)
WORKLOADS = {
    "turns": Workload(turns, Sizes()),
    "tight": Workload(turns, Sizes(users=64)),
    "leave": Workload(turns, _LEAVE),
    "fits": Workload(turns, Sizes(gpu=600_000)),
    "unique": Workload(turns, Sizes(turns=1, system=0, question=(0, 0))),
    "agent": Workload(agent, _AGENT, is_open=True),
    "convoy": Workload(convoy, Sizes(users=50, document=10_000, answer=64)),
    "reload": Workload(reload, _RELOAD),
    "pd": Workload(pd, Sizes(answer=96), is_open=True, needs_trace=True),
    "trace": Workload(trace, Sizes(), needs_trace=True),
}
