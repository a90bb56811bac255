"""`pdstore ls`, `du`, `inspect` and `purge`: the values of a pool, seen and forgotten."""

from __future__ import annotations

from heapq import nsmallest
from math import inf

from pdstore.cli.answer import Answer, age, busy, count, counted, muted, size, table
from pdstore.cli.pool_view import (
    Found,
    NamespaceUse,
    OpenPool,
    StoredKey,
    open_any,
    open_pool,
    survey,
)
from pdstore.errors import ConfigError
from pdstore.format.keys import BlockKey, Kind
from pdstore.format.namespace import Json, prefix_of
from pdstore.outcome import Reason
from pdstore.store.base import MAX_KEY_CHARS
from pdstore.store.optional import ALL_KEYS, StoredValue, TellsRoom, find_optional

_UNREADABLE = {
    Reason.CORRUPT: "damaged: its checksum is wrong",
    Reason.OTHER_SEAL: "sealed with a key that is not in PDSTORE_SEAL_KEY_FILE",
    Reason.FORGED: "damaged or forged: its seal is broken",
}
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
    rows: list[list[str]] = []
    documents: list[Json] = []
    for use in uses:
        counts = [use.counts[kind] for kind in (Kind.BLOCK, Kind.TAIL, Kind.HANDOFF)]
        ages = age(use.youngest_s), age(use.oldest_s)
        rows.append([use.hex[:DIGITS], size(use.num_bytes), *map(count, counts), *ages])
        document: dict[str, Json] = {"namespace": use.hex, "bytes": use.num_bytes}
        document |= zip(("blocks", "tails", "markers"), counts, strict=True)
        document["parts"] = [list(part) for part in sorted(use.parts)]
        document |= {"youngest_s": use.youngest_s, "oldest_s": use.oldest_s}
        documents.append(document)
    return Answer(
        {
            "store": label,
            "room": dict(room._asdict()) if room else None,
            "namespaces": documents,
        },
        [table(columns, rows), muted(note)],
    )


def _kind(value: StoredValue) -> str:
    key = StoredKey.parsed(value.key)
    return "?" if key is None else key.kind.value


def _line(value: StoredValue) -> list[str]:
    _, _, name = value.key.partition(":")
    namespace, _, rest = name.partition(":")
    shown = [namespace[:DIGITS], rest[:MAX_KEY_CHARS]] if rest else ["", name[:MAX_KEY_CHARS]]
    return [age(value.age_s), size(value.num_bytes), _kind(value), *shown]


def inspect(url: str | None, text: str) -> Answer:
    """Reads one value and compares its header with its key. Status 1 if it is missing or wrong.

    text: a key, or a piece that only one key has.
    Raises ConfigError.
    """
    with open_pool(url) as pool:
        listed = _value_of(pool, text)
        key = listed.key if listed else BlockKey(text)
        said = StoredKey.parsed(key)
        if said is None:
            raise ConfigError(
                f"{text!r} is in no key of pdstore's in {pool.store.label}: `pdstore ls` shows them"
            )
        found = pool.read(key)
    verdict = _verdict(said, found)
    facts: dict[str, Json] = {"key": key, "kind": said.kind.value, "verdict": verdict}
    if found is not None:
        facts["bytes"] = found.num_bytes
        facts["age_s"] = listed.age_s if listed else None
        if found.header is not None:
            facts |= {
                name: value.hex() if isinstance(value, bytes) else value
                for name, value in found.header._asdict().items()
            }
    rows = [[name, _shown(name, value)] for name, value in facts.items()]
    return Answer(facts, [table(["", ""], rows)], status=int(verdict != "right"))


def _value_of(pool: OpenPool, text: str) -> StoredValue | None:
    """Returns the one value whose key is, or has in it, `text`; None if there is none.

    Raises ConfigError if there are several.
    """
    with busy(f"listing {pool.store.label}"):
        meant = [value for value in pool.lists.stored_values() if text in value.key]
    exact = [value for value in meant if value.key == text]
    if len(meant) > 1 and not exact:
        raise ConfigError(f"{len(meant)} keys have {text!r} in them, {meant[0].key} is one")
    return next(iter(exact or meant), None)


def _verdict(said: StoredKey, found: Found | None) -> str:
    if found is None:
        return "missing"
    if found.header is None:
        return (
            _UNREADABLE.get(found.reason or Reason.CORRUPT, "damaged") + ", and nobody will use it"
        )
    header = found.header
    tokens = header.num_tokens if said.num_tokens is None else said.num_tokens
    same = said.kind is Kind.POOL or (
        (header.namespace.hex(), header.prefix_hash.hex()) == (said.namespace, said.name)
        and (header.group, header.shard, header.num_tokens) == (said.group, said.shard, tokens)
    )
    return "right" if same else "foreign: whole, but of another key, and nobody will use it"


def _shown(name: str, value: Json) -> str:
    if name == "age_s":
        return f"{age(value if isinstance(value, float) else None)} since its last use"
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,} ({size(value)})"
    return str(value)


def clear(url: str | None, beginning: str, *, is_rehearsal: bool) -> Answer:
    """Clears the one namespace whose hex digits begin so; a rehearsal only counts.

    Raises ConfigError if the pool has none or several, which names them; and for less than all
    digits where the store cannot list its values.
    """
    with open_any(url) as (_, store, lists):
        label = store.label
        with busy(f"listing {label}"):
            use = _namespace_of(survey(lists.stored_values()) if lists else None, beginning, label)
        if not is_rehearsal:
            with busy(f"clearing {use.hex}"):
                store.clear(use.hex)
    counts = f"{counted(use.num_values, 'value')}, {size(use.num_bytes)}," if lists else "all"
    what = f"{counts} of {use.hex} in {label}"
    line = f"would forget {what} (--dry-run)" if is_rehearsal else f"forgot {what}"
    document: Json = {
        "store": label,
        "namespace": use.hex,
        "num_values": use.num_values if lists else None,
        "bytes": use.num_bytes if lists else None,
        "cleared": not is_rehearsal,
    }
    return Answer(document, [line])


def _namespace_of(uses: list[NamespaceUse] | None, beginning: str, label: str) -> NamespaceUse:
    """Returns the one namespace that is meant. Raises ConfigError."""
    if len(beginning) == 32:
        try:
            prefix_of(beginning)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return next((use for use in uses or () if use.hex == beginning), NamespaceUse(beginning))
    if uses is None:
        raise ConfigError(
            f"{label} cannot list its namespaces: give all 32 digits, which are in the first line"
            " of P's and D's log and in pdstore_info"
        )
    meant = [use for use in uses if use.hex.startswith(beginning)]
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(use.hex for use in (meant or uses)[:8]) or "none"
    raise ConfigError(
        f"{label}: {len(meant)} namespaces begin with {beginning!r}; those there: {known}"
    )
