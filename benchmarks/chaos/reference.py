"""The answers that all others are compared with: one instance's, without a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.chaos.asking import Answer, ask
from benchmarks.chaos.engines import ENGINES, Engine
from benchmarks.chaos.spawner import Spawner
from benchmarks.chaos.stage import wait_ready
from examples.ports import free_ports


async def answers_of_one(
    spawner: Spawner,
    model: Path,
    prompts: Sequence[Sequence[int]],
    engine: Engine = ENGINES["mini"],
) -> list[Answer]:
    """Starts an instance that answers all prompts, one after the other."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    alone = spawner.spawn("alone", engine.command(model, port, "", ""), engine.env("", ""))
    try:
        await wait_ready(alone, url)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return [await ask(client, url, prompt, engine) for prompt in prompts]
    finally:
        alone.kill()
