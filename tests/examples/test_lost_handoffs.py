"""PDSTORE_ON_MISS=fail behind the router: 502 with the reason, or P is asked once more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import anyio.to_thread
import httpx
import pytest

from examples.make_checkpoint import ROOT
from examples.ports import free_port
from tests.examples.test_mini_server import Serving
from tests.support.child import child
from tests.support.mini_engine_kit import pd_of, prompt_of, until
from tests.support.redis_gate import LOAD, SAVE, Gate
from tests.support.redis_server import RedisServer
from tests.support.router_kit import metric, routed

pytestmark = pytest.mark.anyio

PATIENT_S, HASTY_S = 60.0, 0.5
DEAD_S = 20.0
"""A dead P costs D 1.5 s; a machine may be slow."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def gates(redis):
    """P's way to the pool, and D's."""
    gates = Gate(redis.port), Gate(redis.port)
    yield gates
    for gate in gates:
        gate.close()


@pytest.fixture
def open_instance(gates, checkpoints):
    opened = []

    def open_one(role: str, wait_s: float = PATIENT_S) -> Serving:
        url = gates[role == "decode"].url
        settings = pd_of(role, url, handoff_wait_s=wait_s, on_miss="fail")
        opened.append(Serving(checkpoints["llama"], settings))
        return opened[-1]

    yield open_one
    for gate in gates:
        gate.release()
    for each in opened:
        each.close()  # every block must have come back


def body_of(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 5, "return_token_ids": True}


def ids_in(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


async def soon(condition: Any) -> None:
    await anyio.to_thread.run_sync(partial(until, condition))


async def test_a_killed_p_is_a_502_within_seconds(gates, checkpoints, open_instance):
    d, port = open_instance("decode"), free_port()
    options = ["--model", checkpoints["llama"], "--port", str(port), "--num-blocks", "32"]
    command = [sys.executable, "-m", "examples.mini_engine", "--role", "prefill", *options]
    environment = os.environ | {"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": gates[0].url}
    got: list[httpx.Response] = []
    with child(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as p:
        assert any(line.startswith("ready") for line in p.stderr)
        gates[0].hold(SAVE)
        async with routed([f"http://127.0.0.1:{port}"], [d.url]) as client:

            async def ask() -> None:
                got.append(await client.post("/v1/completions", json=body_of(prompt_of(150))))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await soon(lambda: gates[0].held and d.engine.scheduler.unfinished())
                assert not got
                p.kill()
                killed_at = time.monotonic()
            assert time.monotonic() - killed_at < DEAD_S
            assert got[0].status_code == 502
            message = got[0].json()["error"]["message"]
            assert message == "the hand-off fell short: handoff_gone", "P had stored nothing"
            await soon(lambda: d.engine.cache.num_free == d.engine.cache.num_blocks)
            again = await client.post("/v1/completions", json=body_of(prompt_of(150)))
    assert len(ids_in(again)) == 5  # nobody handed it over, so D computed it


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_block_that_is_lost_is_a_502_or_made_again(redis, gates, open_instance, retries):
    p, d = open_instance("prefill"), open_instance("decode")
    prompt = prompt_of(150, seed=retries)
    got: list[httpx.Response] = []
    gates[1].hold(LOAD)
    async with routed([p.url], [d.url], retries=retries) as client:

        async def ask() -> None:
            got.append(await client.post("/v1/completions", json=body_of(prompt)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await soon(lambda: gates[1].held)
            with redis.client() as raw:
                raw.delete(gates[1].held[0])
            gates[1].release()
        assert await metric(client, "router_lost_handoffs_total") == 1
    if retries:
        assert ids_in(got[0]) == ids_in(p.post(**body_of(prompt)))
        assert got[0].json()["usage"]["pdstore"]["loaded_tokens"] == 149
    else:
        assert got[0].status_code == 502
        assert got[0].json()["error"]["message"] == "the hand-off fell short: lost"
    await soon(lambda: d.engine.cache.num_free == d.engine.cache.num_blocks)


async def test_a_marker_that_is_late_is_a_502(gates, open_instance):
    p, d = open_instance("prefill"), open_instance("decode", HASTY_S)
    gates[0].hold(SAVE)
    async with routed([p.url], [d.url]) as client:
        got = await client.post("/v1/completions", json=body_of(prompt_of(150, seed=3)))
    assert got.status_code == 502
    assert got.json()["error"]["message"] == "the hand-off fell short: handoff_late"
    await soon(lambda: d.engine.cache.num_free == d.engine.cache.num_blocks)
