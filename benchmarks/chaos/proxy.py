"""Proxy: a TCP connection's middle, which slows, trickles, holds, cuts and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Literal

Mode = Literal["pass", "slow", "trickle", "hold", "half", "refuse"]

_CHUNK = 1 << 16


class Proxy:
    """Passes connections on to one port of this host, as well as its mode lets it.

    slow: each piece waits some milliseconds. trickle: a few bytes at a time. hold: nothing passes,
    and what was sent comes late. half: the one direction passes and the other is held. refuse: new
    connections are closed at once.
    """

    def __init__(self, name: str, target: int, seed: str) -> None:
        self.name, self.target = name, target
        self._random = random.Random(seed)
        self._mode: Mode = "pass"
        self._changed = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def be(self, mode: Mode) -> None:
        """Changes the mode, also of the connections that are open."""
        async with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def cut(self) -> None:
        """Breaks all connections off, wherever they are."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._mode != "refuse":
                with contextlib.suppress(asyncio.CancelledError):  # by `close`
                    await self._connect(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.target)
            both = {writer, ours}
            self._writers |= both
            pumps = (
                asyncio.ensure_future(self._pump(reader, ours, is_answer=False)),
                asyncio.ensure_future(self._pump(theirs, writer, is_answer=True)),
            )
            try:
                await asyncio.gather(*pumps)
            finally:
                self._writers -= both
                ours.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        """Passes one direction on until its end; an end, too, has to come through."""
        while data := await reader.read(_CHUNK):
            await self._pass_on(data, writer, is_answer)
        await self._wait_while_held(is_answer)
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _pass_on(self, data: bytes, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        while data:
            await self._wait_while_held(is_answer)
            count = len(data)
            if self._mode == "slow":
                await asyncio.sleep(self._random.uniform(0.001, 0.05))
            elif self._mode == "trickle":
                count = self._random.randint(1, 99)
                await asyncio.sleep(0.002)
            writer.write(data[:count])
            await writer.drain()
            data = data[count:]

    async def _wait_while_held(self, is_answer: bool) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not (self._mode == "hold" or (self._mode == "half" and is_answer))
            )
