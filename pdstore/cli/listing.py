"""`pdstore ls` and `du`: a pool's values, one by one and by namespace."""

from __future__ import annotations

from heapq import nsmallest
from math import inf

from pdstore.cli.answer import Answer, busy, muted, table
from pdstore.cli.open_pool import open_pool
from pdstore.cli.quantity import age, count, counted, size
from pdstore.cli.stored_key import StoredKey
from pdstore.cli.survey import NamespaceUse, survey
from pdstore.format.keys import Kind
from pdstore.format.namespace import Json
from pdstore.store.base import MAX_KEY_CHARS
from pdstore.store.optional import ALL_KEYS, StoredValue, TellsRoom, find_optional

DIGITS = 12
"""Digits of a namespace that people are shown: enough to tell those of a pool apart."""


def ls(url: str | None, prefix: str, limit: int) -> Answer:
    """Lists the values whose key begins with `prefix`, those used last first.

    limit: most lines; 0 for all.
    """
    with open_pool(url) as pool, busy(f"listing {pool.store.label}"):
        values = list(pool.lists.stored_values(ALL_KEYS + prefix.removeprefix(ALL_KEYS)))
        label = pool.store.label
    youngest = nsmallest(limit or len(values), values, key=lambda v: (v.age_s or inf, v.key))
    rows = [_line(v) for v in youngest]
    total = sum(value.num_bytes for value in values)
    note = f"{counted(len(values), 'value')}, {size(total)}"
    if len(youngest) < len(values):
        note += f"; the {len(youngest)} used last are shown (--limit 0 for all)"
    document: list[Json] = [
        {"key": v.key, "bytes": v.num_bytes, "age_s": v.age_s, "kind": _kind(v)} for v in youngest
    ]
    return Answer(
        {"store": label, "num_values": len(values), "bytes": total, "values": document},
        [table([">used", ">size", "kind", "namespace", "group:shard:name"], rows), muted(note)],
    )


def du(url: str | None) -> Answer:
    """Counts values and bytes by namespace, and says how full the store is."""
    with open_pool(url) as pool, busy(f"listing {pool.store.label}"):
        uses = survey(pool.lists.stored_values())
        tells = find_optional(pool.store, TellsRoom)
        room = tells.room() if tells else None
        label = pool.store.label
    total = size(sum(use.num_bytes for use in uses))
    note = f"{label}: {total} in {counted(len(uses), 'namespace')}"
    if room is not None and room.capacity_bytes:
        used = (room.used_bytes or 0) / room.capacity_bytes
        note += f"; {used:.0%} of {size(room.capacity_bytes)} used ({room.keeper}, {room.policy})"
    columns = ["namespace", ">bytes", ">blocks", ">tails", ">markers", ">last used", ">oldest"]
    return Answer(
        {
            "store": label,
            "room": dict(room._asdict()) if room else None,
            "namespaces": [_document(use) for use in uses],
        },
        [table(columns, [_row(use) for use in uses]), muted(note)],
    )


def _kind(value: StoredValue) -> str:
    key = StoredKey.of(value.key)
    return "?" if key is None else key.kind.value


def _line(value: StoredValue) -> list[str]:
    _, _, name = value.key.partition(":")
    namespace, _, rest = name.partition(":")
    shown = [namespace[:DIGITS], rest[:MAX_KEY_CHARS]] if rest else ["", name[:MAX_KEY_CHARS]]
    return [age(value.age_s), size(value.num_bytes), _kind(value), *shown]


def _row(use: NamespaceUse) -> list[str]:
    counts = [count(use.counts[kind]) for kind in (Kind.BLOCK, Kind.TAIL, Kind.HANDOFF)]
    return [use.hex[:DIGITS], size(use.num_bytes), *counts, age(use.youngest_s), age(use.oldest_s)]


def _document(use: NamespaceUse) -> Json:
    return {
        "namespace": use.hex,
        "bytes": use.num_bytes,
        "blocks": use.counts[Kind.BLOCK],
        "tails": use.counts[Kind.TAIL],
        "markers": use.counts[Kind.HANDOFF],
        "parts": [list(part) for part in sorted(use.parts)],
        "youngest_s": use.youngest_s,
        "oldest_s": use.oldest_s,
    }
