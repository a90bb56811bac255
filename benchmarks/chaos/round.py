"""Round: some seconds of clients and faults; then calm, in which everything must work again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.chaos.asking import Answer, NoAnswerError, ask
from benchmarks.chaos.injector import Injector
from benchmarks.chaos.plan import Fault
from benchmarks.chaos.stage import Stage

DEADLINE_S = 20.0
"""No request may take longer: P has 3 s, D's waits and jobs 3.5 s, and stops last 1.5 s each."""
NUM_CLIENTS = 6
_NUM_CALM = 3


@dataclass
class Outcome:
    """Counts of how the requests of a round ended.

    refused: error answers while a fault was on their way; failures: everything that must not be.
    """

    right: int = 0
    loaded: int = 0
    refused: int = 0
    left: int = 0
    slowest_s: float = 0.0
    heal_s: float = 0.0
    calm_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Round:
    """One round on a stage.

    prompts, answers: each prompt with one instance's answer to it.
    join_s: how long D may need to load again once all is whole.
    """

    def __init__(
        self,
        stage: Stage,
        injector: Injector,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        seed: str,
        join_s: float = 20.0,
    ) -> None:
        self._join_s = join_s
        self._stage, self._injector = stage, injector
        self._prompts, self._answers, self._seed = prompts, answers, seed
        self.outcome = Outcome()
        self._is_over = False

    async def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Asks while the faults happen, heals the stage, and asks in calm."""
        timeout = httpx.Timeout(DEADLINE_S)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout) as client:
            clients = [
                asyncio.create_task(self._ask_on(client, f"{self._seed} client {n}"))
                for n in range(NUM_CLIENTS)
            ]
            await asyncio.gather(self._injector.run(faults), asyncio.sleep(seconds))
            self._is_over, began = True, time.monotonic()
            died = await self._stage.heal()
            self.outcome.failures += [f"died by itself: {each}" for each in died]
            await asyncio.gather(*clients)
            self.outcome.heal_s = time.monotonic() - began
        async with httpx.AsyncClient(trust_env=False, timeout=timeout) as client:
            began = time.monotonic()
            await self._ask_in_calm(client)
            await self._ask_below(client)
            self.outcome.calm_s = time.monotonic() - began

    async def _ask_on(self, client: httpx.AsyncClient, seed: str) -> None:
        draw = random.Random(seed)
        while not self._is_over:
            number, streams = draw.randrange(len(self._prompts)), draw.random() < 0.3
            asked = asyncio.create_task(self._ask(client, number, streams=streams))
            leaving = asyncio.create_task(self._injector.leaving.wait())
            await asyncio.wait((asked, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not asked.done():
                asked.cancel()
                self.outcome.left += 1
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(draw.uniform(0.0, 0.02))

    async def _ask(
        self, client: httpx.AsyncClient, number: int, *, streams: bool = False, url: str = ""
    ) -> Answer | None:
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(
                ask(
                    client,
                    url or self._stage.url,
                    self._prompts[number],
                    self._stage.options.engine,
                    streams=streams,
                ),
                DEADLINE_S,
            )
        except NoAnswerError as error:
            if self._injector.may_have_cost(began, time.monotonic()):
                self.outcome.refused += 1
            else:
                self.outcome.failures.append(f"lost: prompt {number}: {error}")
            await asyncio.sleep(0.05)
            return None
        except (httpx.TimeoutException, asyncio.TimeoutError):
            self.outcome.failures.append(f"hang: prompt {number} after {DEADLINE_S:g} s")
            return None
        self.outcome.slowest_s = max(self.outcome.slowest_s, time.monotonic() - began)
        self._compare(number, answer)
        return answer

    def _compare(self, number: int, answer: Answer) -> None:
        tolerance = self._stage.options.engine.tolerance
        if answer.is_like(self._answers[number], tolerance):
            self.outcome.right += 1
            self.outcome.loaded += answer.num_loaded > 0
        else:
            self.outcome.failures.append(
                f"wrong: prompt {number}: {answer}, and one instance says {self._answers[number]}"
            )

    async def _ask_in_calm(self, client: httpx.AsyncClient) -> None:
        """Asks until D loads again. No fault excuses anything now."""
        draw = random.Random(f"{self._seed} calm")
        long = self._long_prompts()
        deadline, num_loaded = time.monotonic() + self._join_s, 0
        while num_loaded < _NUM_CALM and time.monotonic() < deadline:
            answer = await self._ask(client, draw.choice(long), streams=False)
            num_loaded += answer is not None and answer.num_loaded > 0
        if num_loaded < _NUM_CALM and not self._stage.options.faulty:
            self.outcome.failures.append(f"D does not load again within {self._join_s:g} s")

    def _long_prompts(self) -> list[int]:
        block_tokens = self._stage.options.engine.block_tokens
        return [n for n, prompt in enumerate(self._prompts) if len(prompt) > 2 * block_tokens]

    async def _ask_below(self, client: httpx.AsyncClient) -> None:
        """Asks D alone until it loads blocks that are in the lower tier only."""
        await asyncio.to_thread(self._stage.pool.purge_again)
        draw = random.Random(f"{self._seed} below")
        deadline, num_tries = time.monotonic() + self._join_s, 0
        while time.monotonic() < deadline:
            number, num_tries = draw.choice(self._long_prompts()), num_tries + 1
            await self._ask(client, number, streams=False)  # P saves it
            await asyncio.sleep(0.05 * num_tries)  # it is copied down
            if not await asyncio.to_thread(self._stage.pool.leave_below):
                return
            answer = await self._ask(client, number, url=self._stage.url_of("decode"))
            if answer is not None and answer.num_loaded > 0:
                return
        if not self._stage.options.faulty:
            self.outcome.failures.append(f"nothing is loaded from below within {self._join_s:g} s")
