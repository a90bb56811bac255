"""server_doubts: what redis servers say about themselves that a pool should not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import redis
from pydantic import ByteSize

from pdstore.store.optional import ServerDoubt

Told: TypeAlias = Mapping[str, Any]
"""A reply to INFO or CONFIG GET, by name."""

_TRIES = 8
_IDLE_S = 60  # after so long pdstore renews a connection itself
"""Number of connections that are made to see whether one address leads to several servers."""
_NO_SNAPSHOTS = (
    'redis-cli CONFIG SET save "" and CONFIG SET appendonly no, the same in redis.conf: a pool'
    " needs no copy on a disk"
)
_ONE_SERVER = (
    "name one of them (in Kubernetes: replicas 1, or a StatefulSet's pod-0.service), or use"
    " redis+cluster:// or redis+sentinel://"
)

_POLICY_UNTOLD = (
    "this user may ask neither CONFIG nor INFO, so nobody knows how full the server is, and whether"
    " it evicts: then a match gives no lease"
)
_ALLOW = (
    "redis-cli ACL SETUSER this user +info (or +config|get), or ask whoever runs the server to: it"
    " should evict by volatile-lru"
)


def server_doubts(clients: Sequence[redis.Redis]) -> Iterator[ServerDoubt]:
    """Yields what should be changed at the servers of a pool, one client for each.

    A server or a proxy that refuses INFO or CONFIG is asked no more. Raises redis-py's errors if a
    connection fails.
    """
    for client in clients:
        info = _info(client)
        config = _config(client, "save")
        yield from _about_disk(info, config)
        if not info and _config(client, "maxmemory-policy") is None:
            yield ServerDoubt("policy", _POLICY_UNTOLD, _ALLOW)
        yield from _about_memory(info)
        yield from _about_idle_connections(_config(client, "timeout"))
        yield from _about_identity(client, info)


def _info(client: redis.Redis) -> Told:
    with contextlib.suppress(redis.ResponseError):
        return client.info()
    return {}


def _config(client: redis.Redis, name: str) -> str | None:
    """Returns a setting of the server; None if the user may not ask for it."""
    with contextlib.suppress(redis.ResponseError):
        return str(client.config_get(name).get(name))
    return None


def _about_disk(info: Told, save: str | None) -> Iterator[ServerDoubt]:
    snapshots = save not in (None, "", "None")
    if save is None:  # hosted servers refuse CONFIG
        snapshots = bool(info.get("rdb_saves"))
    kinds = [f"snapshots (save {save or 'on'})"] if snapshots else []
    kinds += ["an append-only file"] if info.get("aof_enabled") else []
    if info.get("rdb_last_bgsave_status") == "err" and snapshots:
        message = "the last snapshot failed: the server refuses all writes until one succeeds"
        yield ServerDoubt("persistence", message, _NO_SNAPSHOTS, is_wrong=True)
    elif kinds:
        message = (
            f"the server writes {' and '.join(kinds)}: that stalls it, may take as much memory"
        )
        message += " again, and a full disk ends all writes"
        yield ServerDoubt("persistence", message, _NO_SNAPSHOTS)


def _about_memory(info: Told) -> Iterator[ServerDoubt]:
    most = info.get("maxmemory") or 0
    there = info.get("total_system_memory") or 0
    if there and most > there:
        shown = [ByteSize(size).human_readable() for size in (most, there)]
        message = (
            f"maxmemory is {shown[0]}, and the server's host has {shown[1]}: the kernel ends the"
        )
        message += " server before it evicts"
        yield ServerDoubt(
            "server memory",
            message,
            f"set maxmemory to {ByteSize(there * 3 // 4).human_readable()}",
        )


def _about_idle_connections(timeout: str | None) -> Iterator[ServerDoubt]:
    if timeout is not None and timeout.isdecimal() and 0 < int(timeout) < _IDLE_S:
        message = (
            f"the server closes connections that were idle for {timeout} s (timeout {timeout}):"
        )
        message += " nothing is lost, but the next call connects anew"
        yield ServerDoubt("idle connections", message, "redis-cli CONFIG SET timeout 0")


def _about_identity(client: redis.Redis, info: Told) -> Iterator[ServerDoubt]:
    """Yields a doubt if new connections to one address lead to several servers."""
    found = {info["run_id"]} if info.get("run_id") else set()
    for _ in range(_TRIES if found else 0):
        client.connection_pool.disconnect(inuse_connections=False)
        with contextlib.suppress(redis.ResponseError):
            found.add(client.info("server").get("run_id"))
    if len(found) > 1:
        message = (
            f"{len(found)} servers answer at this address, each of them a pool of its own: what"
        )
        message += " one connection stores, the next does not find"
        yield ServerDoubt("one server", message, _ONE_SERVER, is_wrong=True)
