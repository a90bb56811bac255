"""Servers: the redis server, or the nodes of a cluster, that a store's commands go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import redis

Command: TypeAlias = tuple[str | int | memoryview, ...]
"""A command's name, the key that it is about, and its other arguments."""


class Servers(Protocol):
    """Sends commands about keys to the servers that have them. Any thread may call it."""

    takes_many_keys: bool
    """True if one command may name several keys."""

    def ask(self, commands: Sequence[Command]) -> list[object]:
        """Returns a reply for each command, and a RedisError for one that was not answered.

        Raises RedisError where none was.
        """

    def masters(self) -> Sequence[redis.Redis]:
        """Returns a client for each server that keeps keys. Raises RedisError."""

    def disconnect(self) -> None:
        """Closes idle connections."""


class OneServer:
    """A single server, or the master that sentinels name."""

    takes_many_keys = True

    def __init__(self, pool: redis.ConnectionPool, *sentinels: redis.ConnectionPool) -> None:
        self._pools = (pool, *sentinels)
        self._client = redis.Redis(connection_pool=pool)

    def ask(self, commands: Sequence[Command]) -> list[object]:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]
        replies: list[object] = pipe.execute(raise_on_error=False)
        return replies

    def masters(self) -> Sequence[redis.Redis]:
        return [self._client]

    def disconnect(self) -> None:
        for pool in self._pools:
            pool.disconnect(inuse_connections=False)
