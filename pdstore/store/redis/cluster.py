"""OneServer sends commands to one redis server; Cluster sends each to the node of its key."""

# Decision: docs/decisions/030-redis-fan-out.md
from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
)

Command: TypeAlias = tuple[str | int | memoryview, ...]
"""A command's name, the key that it is about, and its other arguments."""

_ROUNDS = 3
"""Maximum number of sends of one command, whose hash slot may move to another node meanwhile."""

_OF_A_REPLICA = (ReadOnlyError, MasterDownError)
"""Errors of a server that was a master when the connection was made, or whose master is away."""

_RENEW_INTERVAL_S = 1.0
"""Connections to a node are made anew at most once in this time: its address may always lead to a
replica, and then each call would make new ones."""

_ELSEWHERE = (MovedError, AskError, *_OF_A_REPLICA, redis.ConnectionError)
"""Errors after which a command is sent to another node; not a timeout, which took long already."""

_LATER = (redis.TimeoutError, ClusterDownError)
"""Errors after which the next call reads the map of the slots again."""


class Address(NamedTuple):
    """The host and port of a node."""

    host: str
    port: int


class OneServer:
    """Sends all commands to one server, or to the master that sentinels name; used as `Cluster` is.

    The server's address may be a name that leads to the new master after a failover, as a Service
    of Kubernetes does. Old connections stay with the old master. So if a server says that it is a
    replica, all connections are replaced, and what it refused is sent once more.

    open_pool: returns a pool of connections to the server; the connections are not open yet.
    call_timeout_s: if a reply took longer, its command is not sent once more.
    sentinels: connections to the sentinels.
    """

    def __init__(
        self,
        open_pool: Callable[[], redis.ConnectionPool],
        call_timeout_s: float,
        *sentinels: redis.ConnectionPool,
    ) -> None:
        self._open_pool = open_pool
        self._call_timeout_s = call_timeout_s
        self._sentinels = sentinels
        self._client = redis.Redis(connection_pool=open_pool())
        self._lock = threading.Lock()
        self._renewed_at = -math.inf

    def ask(self, commands: Sequence[Command]) -> list[object]:
        client = self._client
        began_at = time.monotonic()
        replies = _ask(client, commands)
        refused = [i for i, reply in enumerate(replies) if isinstance(reply, _OF_A_REPLICA)]
        is_late = time.monotonic() - began_at > self._call_timeout_s
        if refused and not is_late and self._renew(client):
            again = _ask(self._client, [commands[i] for i in refused])
            for i, reply in zip(refused, again, strict=True):
                replies[i] = reply
        return replies

    def masters(self) -> Sequence[redis.Redis]:
        return [self._client]

    def disconnect(self) -> None:
        for pool in (self._client.connection_pool, *self._sentinels):
            pool.disconnect(inuse_connections=False)

    def _renew(self, client: redis.Redis) -> bool:
        """Replaces the connections of a client unless another call has; False if it is too soon.

        A connection that is in use now goes back to the old pool, so nobody gets it again.
        """
        with self._lock:
            if client is not self._client:
                return True
            now = time.monotonic()
            if now - self._renewed_at < _RENEW_INTERVAL_S:
                return False
            self._renewed_at = now
            self._client = redis.Redis(connection_pool=self._open_pool())
        client.connection_pool.disconnect(inuse_connections=False)
        return True


class Cluster:
    """Sends commands to a redis cluster: each master gets all commands for its keys in one go.

    seeds: some nodes of the cluster; at least one of them must answer the first call.
    open_pool: returns a pool of connections to a node; the connections are not open yet.

    Any thread may call it. The first call connects, and reads the map of the hash slots, which says
    which master has which keys. The map is read again after a reply that shows that it is outdated.
    """

    def __init__(
        self, seeds: Sequence[Address], open_pool: Callable[[Address], redis.ConnectionPool]
    ) -> None:
        self._nodes = dict.fromkeys(seeds)  # as a set in order; what has failed last comes last
        self._open_pool = open_pool
        self._clients: dict[Address, redis.Redis] = {}
        self._map: list[Address | None] | None = None

    def ask(self, commands: Sequence[Command]) -> list[object]:
        """Returns a reply for each command; the reply is a RedisError if the command failed.

        Raises RedisError if no node returns a map of the slots.
        """
        replies: list[object] = [None] * len(commands)
        waiting: Sequence[int] = range(len(commands))
        for number in range(_ROUNDS):
            if number:
                self._map = None
            try:
                slots = self._map or self._read_map()
            except RedisError:
                if number == 0:
                    raise
                break  # the replies so far are the errors to return
            self._send(commands, waiting, replies, slots)
            waiting = [i for i in waiting if isinstance(replies[i], _ELSEWHERE)]
            if not waiting:
                break
        if any(isinstance(reply, _LATER) for reply in replies):
            self._map = None
        return replies

    def masters(self) -> Sequence[redis.Redis]:
        """Returns a client for each server that keeps keys. Raises RedisError."""
        slots = self._read_map()  # each time: the callers' commands would not show an old map
        return [self._client(address) for address in dict.fromkeys(slots) if address is not None]

    def disconnect(self) -> None:
        """Closes idle connections."""
        for client in list(self._clients.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def _send(
        self,
        commands: Sequence[Command],
        waiting: Iterable[int],
        replies: list[object],
        slots: Sequence[Address | None],
    ) -> None:
        """Sends the waiting commands to one node after the other; writes into `replies`."""
        parts: dict[tuple[Address, bool], list[int]] = {}
        for i in waiting:
            before = replies[i]
            slot = key_slot(str(commands[i][1]).encode())
            if isinstance(before, AskError):
                parts.setdefault((Address(before.host, before.port), True), []).append(i)
            elif (address := slots[slot]) is not None:
                parts.setdefault((address, False), []).append(i)
            else:
                replies[i] = ClusterDownError(f"no node serves slot {slot}")
        for (address, is_asking), part in parts.items():
            sent = [commands[i] for i in part]
            found: list[object]
            try:
                found = _ask(self._client(address), sent, asking=is_asking)
            except RedisError as error:
                self._nodes[address] = self._nodes.pop(address, None)
                found = [error] * len(sent)
            for i, reply in zip(part, found, strict=True):
                if isinstance(reply, AskError):
                    reply.host = self._host_in(reply, address, slots)
                replies[i] = reply

    def _host_in(self, ask: AskError, asked: Address, slots: Iterable[Address | None]) -> str:
        """Returns the host to which a node sends a command; the node may omit or not know it.

        Without a host it means its own; `?` stands for a node that announces no name, which may be
        known by its port.
        """
        if ask.host != "?":
            return str(ask.host) or asked.host
        known = (*self._nodes, *filter(None, dict.fromkeys(slots)))
        return next((node.host for node in known if node.port == ask.port), "?")

    def _client(self, address: Address) -> redis.Redis:
        client = self._clients.get(address)
        if client is None:
            self._nodes.setdefault(address)
            made = redis.Redis(connection_pool=self._open_pool(address))
            client = self._clients.setdefault(address, made)
        return client

    def _read_map(self) -> list[Address | None]:
        """Returns the master of each slot, as the first node says that returns any masters."""
        problem: RedisError = redis.ConnectionError("no node of the cluster is known")
        for address in list(self._nodes):
            try:
                client = self._client(address)
                slots = client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
            except RedisError as error:
                self._nodes[address] = self._nodes.pop(address, None)
                problem = error
                continue
            if not slots:  # the node has left the cluster, or has not joined it yet
                problem = ClusterDownError("no node serves any slot")
                continue
            self._map = found = _map_of(slots, address)
            return found
        raise problem


def _ask(client: redis.Redis, commands: Sequence[Command], *, asking: bool = False) -> list[object]:
    """Sends commands in one pipeline; returns the replies, some may be errors. Raises RedisError.

    asking: True sends ASKING before each command, for a slot that is moving to this node.
    """
    pipe = client.pipeline(transaction=False)
    for command in commands:
        if asking:
            pipe.execute_command("ASKING")  # type: ignore[no-untyped-call]
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]
    replies: list[object] = pipe.execute(raise_on_error=False)
    return replies[1::2] if asking else replies


def _map_of(slots: Iterable[Any], asked: Address) -> list[Address | None]:
    """Returns the master of each slot from the reply of a node.

    The node may omit its host. It says `?` for a node that should have a name, but announces none;
    then the node's address is in the list that follows its port and id.
    """
    found: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for start, end, (host, port, *more), *_ in slots:
        if host == b"?":
            names = more[1] if len(more) > 1 else []
            host = dict(zip(names[::2], names[1::2], strict=False)).get(b"ip", host)
        address = Address(host.decode() if host else asked.host, port)
        found[start : end + 1] = [address] * (end + 1 - start)
    return found
