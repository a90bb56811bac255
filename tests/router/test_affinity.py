"""Affinity: a conversation stays on its instance, unless that one has more to do than others."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from starlette.responses import JSONResponse, Response

from pdstore.router.upstreams import Rotation
from tests.support.router_kit import Fake, nobody, routed, says

pytestmark = pytest.mark.anyio
SYSTEM = [7] * 600


def prompt_of(user: int, turn: int) -> list[int]:
    """A system prompt that all share, a user's document, and all turns so far."""
    return SYSTEM + [1000 + user] * 1500 + list(range(100 * turn))


async def ask(client: httpx.AsyncClient, user: int, turn: int) -> int:
    body = {"model": "m", "prompt": prompt_of(user, turn), "max_tokens": 9}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    return int(answer.json()["instance"])


def instances(count: int) -> list[Fake]:
    return [Fake(says({"instance": number})) for number in range(count)]


async def test_a_conversation_stays_on_its_instance_and_users_are_spread() -> None:
    async with routed([], instances(2), by_prefix=True) as client:
        asked: dict[int, list[int]] = {}
        for turn in range(3):
            for user in range(8):
                asked.setdefault(user, []).append(await ask(client, user, turn))
    assert all(len(set(where)) == 1 for where in asked.values())
    assert {where[0] for where in asked.values()} == {0, 1}


async def test_without_affinity_instances_take_turns() -> None:
    async with routed([], instances(2)) as client:
        where = [await ask(client, 0, turn) for turn in range(4)]
    assert where in ([0, 1, 0, 1], [1, 0, 1, 0])


async def test_an_instance_with_more_to_do_is_relieved() -> None:
    release = anyio.Event()

    def slow(number: int) -> Fake:
        async def reply(body: dict[str, Any]) -> Response:
            await release.wait()
            return JSONResponse({"instance": number})

        return Fake(reply)

    fakes = [slow(0), slow(1)]
    async with routed([], fakes, by_prefix=True) as client, anyio.create_task_group() as group:
        for _ in range(6):  # one conversation, asked six times at once
            group.start_soon(ask, client, 0, 0)
        with anyio.fail_after(10):
            while sum(len(fake.bodies) for fake in fakes) < 6:
                await anyio.sleep(0.01)
        release.set()
    assert min(len(fake.bodies) for fake in fakes) >= 2


async def test_an_instance_that_is_gone_is_replaced() -> None:
    with nobody() as gone:
        fake = Fake(says({"instance": 1}))
        async with routed([], [gone, fake], by_prefix=True) as client:
            assert [await ask(client, 0, turn) for turn in range(3)] == [1, 1, 1]


async def test_a_short_prompt_and_a_chat_are_asked_as_well() -> None:
    async with routed([], instances(2), by_prefix=True) as client:
        short = await client.post("/v1/completions", json={"model": "m", "prompt": "Hello"})
        messages = [{"role": "user", "content": "word " * 600}]
        body = {"model": "m", "messages": messages}
        chats = [await client.post("/v1/chat/completions", json=body) for _ in range(3)]
    assert short.status_code == 200
    assert len({chat.json()["instance"] for chat in chats}) == 1


async def test_a_silent_instance_gets_no_new_conversation() -> None:
    rotation = Rotation("prefill", ["http://a", "http://b"], by_prefix=True)
    rotation.upstreams[0].timed_out(60)
    for user in range(4):
        assert rotation.in_turn({"prompt": prompt_of(user, 0)})[0].url == "http://b"
