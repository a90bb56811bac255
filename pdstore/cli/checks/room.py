"""Checks of a store's room: how much there is, and what goes when it is full."""

from __future__ import annotations

from collections.abc import Iterator

from pdstore.cli.checks.finding import Finding, bad, info, ok, warn
from pdstore.cli.quantity import count, size
from pdstore.errors import ConfigError, StoreError
from pdstore.format.layout import Layout
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.optional import Room, TellsRoom
from pdstore.worker.movers import check_values_fit

_CONNECTIONS = 64
TOKENS = 4096
TOKEN_BYTES = 128 << 10
"""KV of a token of an 8B model with grouped heads, where the user names no model."""


def check_room(store: Store, kv_bytes: int | None) -> Iterator[Finding]:
    """Yields whether a store has room for prompts.

    kv_bytes: of a token; None takes an 8B model's.
    """
    tells = find_optional(store, TellsRoom)
    if tells is None:
        yield info("room", f"{store.label} does not tell how full it is")
        return
    try:
        room = tells.room()
    except StoreError as error:
        yield info("room", f"unknown: {error}")
        return
    yield info("server", f"{room.keeper}, {room.policy}")
    yield _room(room, kv_bytes)
    yield from _policy(room)
    if room.num_connections is not None and room.num_connections < _CONNECTIONS:
        said = f"it takes {room.num_connections} more, and P and D open up to {_CONNECTIONS}"
        yield warn("connections", said, "raise the server's maxclients")


def check_blocks(store: Store, layout: Layout) -> Iterator[Finding]:
    """Yields a finding if a whole block of a model can never be stored."""
    try:
        check_values_fit(store, layout)
    except ConfigError as error:
        yield bad("block size", str(error), "stop P and D first, and run this again after it")


def _room(room: Room, kv_bytes: int | None) -> Finding:
    if room.capacity_bytes is None:
        return warn(
            "room",
            f"{size(room.used_bytes)} used, and no limit",
            "set one (maxmemory, ?budget=): the pool takes all that it is given",
        )
    whose, kv_bytes = ("", kv_bytes) if kv_bytes else (" of an 8B model", TOKEN_BYTES)
    tokens = room.capacity_bytes // kv_bytes
    said = f"{size(room.capacity_bytes)}, KV of {count(tokens)} tokens{whose}"
    said += f" ({size(kv_bytes)} each)"
    if tokens < TOKENS:
        return bad(
            "room",
            f"{said}: less than one prompt of {count(TOKENS)}",
            f"give it {size(64 * TOKENS * kv_bytes)} or more; `pdstore calc --trace` computes it",
        )
    return ok("room", f"{said}; {size(room.used_bytes)} used")


def _policy(room: Room) -> Iterator[Finding]:
    if room.policy.startswith("allkeys-"):
        yield warn(
            "eviction",
            f"{room.policy} may evict the pool's own id, which has no expiry",
            f"set maxmemory-policy {room.policy.replace('allkeys', 'volatile')}, or noeviction",
        )
    if room.num_evicted and room.capacity_bytes:
        yield info("evicted", f"{count(room.num_evicted)} values since the server's start")
