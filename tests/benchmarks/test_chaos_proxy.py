"""Proxy: each mode does to bytes what it says, and no byte is lost or changed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from benchmarks.chaos.proxy import Proxy

DEADLINE_S = 20


@contextlib.asynccontextmanager
async def echoing():
    """A proxy to a server that sends back what it gets."""

    async def echo(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy("test", server.sockets[0].getsockname()[1], "1")
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def send(proxy, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    writer.write_eof()
    return asyncio.ensure_future(reader.read()), writer


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


@pytest.mark.parametrize("mode", ["pass", "slow", "trickle"])
def test_all_bytes_arrive_and_the_end_too(mode):
    async def scenario():
        async with echoing() as proxy:
            await proxy.be(mode)
            data = bytes(range(256)) * 4
            answer, writer = await send(proxy, data)
            assert await answer == data
            writer.close()

    run(scenario())


@pytest.mark.parametrize("mode", ["hold", "half"])
def test_what_is_held_comes_late(mode):
    async def scenario():
        async with echoing() as proxy:
            await proxy.be(mode)
            answer, writer = await send(proxy, b"late")
            done, _ = await asyncio.wait([answer], timeout=0.1)
            assert not done
            await proxy.be("pass")
            assert await answer == b"late"
            writer.close()

    run(scenario())


def test_a_cut_breaks_the_connections_that_are_open():
    async def scenario():
        async with echoing() as proxy:
            await proxy.be("hold")
            answer, writer = await send(proxy, b"x")
            await asyncio.sleep(0.05)
            proxy.cut()
            with contextlib.suppress(ConnectionResetError):
                assert await answer == b""
            writer.close()

    run(scenario())


def test_a_refused_connection_ends_at_once():
    async def scenario():
        async with echoing() as proxy:
            await proxy.be("refuse")
            with contextlib.suppress(ConnectionError):
                answer, writer = await send(proxy, b"x")
                writer.close()
                assert await answer == b""

    run(scenario())
