"""`pdstore du`: counts the values and bytes of a pool by namespace, in all and by tier."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from pdstore.cli.answer import Answer, muted, size, table
from pdstore.cli.listing import DIGITS, NamespaceUse, open_pool, survey, values_once
from pdstore.cli.output import age, counted
from pdstore.format.keys import Json, Kind
from pdstore.store.optional import Room

_COLUMNS = ["namespace", ">bytes", ">blocks", ">tails", ">markers", ">last used", ">oldest"]
_COUNTED = {"blocks": Kind.BLOCK, "tails": Kind.TAIL, "markers": Kind.HANDOFF}


def du(url: str | None) -> Answer:
    """Counts values and bytes by namespace, and says how full the store is.

    Of several tiers it counts a value that is in more than one once, and then each tier by itself.
    Raises ConfigError and StoreError.
    """
    with open_pool(url) as pool:
        by_tier = pool.values_by_tier()
        uses = survey(values_once(by_tier))
        tiers = [
            (tier.label, survey(values), pool.room_of(tier))
            for tier, values in zip(pool.tiers, by_tier, strict=True)
        ]
        label = pool.store.label
        silent = pool.silent
    first_room = tiers[0][2]
    total = _total(label, uses)
    if len(tiers) == 1:
        total += _used(first_room)
    shown: list[RenderableType] = [_table(uses), muted(total)]
    for tier, of_tier, room in tiers if len(tiers) > 1 else ():
        if tier not in silent:
            shown += ["", _table(of_tier), muted(_total(tier, of_tier) + _used(room))]
    documents: list[Json] = [
        {
            "store": tier,
            "room": _as_json(room),
            "namespaces": None if tier in silent else _namespaces(of_tier),
        }
        for tier, of_tier, room in tiers
    ]
    return Answer(
        {
            "store": label,
            "room": _as_json(first_room),
            "tiers": documents,
            "namespaces": _namespaces(uses),
            "problems": [*silent.values()],
        },
        [*shown, *silent.values()],
        status=int(bool(silent)),
    )


def _table(uses: Sequence[NamespaceUse]) -> RenderableType:
    rows = []
    for use in uses:
        counts = [f"{use.counts[kind]:,}" for kind in _COUNTED.values()]
        ages = age(use.youngest_s), age(use.oldest_s)
        rows.append([use.hex[:DIGITS], size(use.num_bytes), *counts, *ages])
    return table(_COLUMNS, rows)


def _total(label: str, uses: Sequence[NamespaceUse]) -> str:
    total = size(sum(use.num_bytes for use in uses))
    return f"{label}: {total} in {counted(len(uses), 'namespace')}"


def _namespaces(uses: Sequence[NamespaceUse]) -> list[Json]:
    documents: list[Json] = []
    for use in uses:
        document: dict[str, Json] = {"namespace": use.hex, "bytes": use.num_bytes}
        document |= {name: use.counts[kind] for name, kind in _COUNTED.items()}
        document["parts"] = [list(part) for part in sorted(use.parts)]
        document["drafts"] = dict(use.drafts)
        document |= {"youngest_s": use.youngest_s, "oldest_s": use.oldest_s}
        documents.append(document)
    return documents


def _used(room: Room | None) -> str:
    """Returns how full a store is, as the end of a line; an empty text if it does not tell."""
    if room is None or not room.capacity_bytes:
        return ""
    used = (room.used_bytes or 0) / room.capacity_bytes
    return f"; {used:.0%} of {size(room.capacity_bytes)} used ({room.keeper}, {room.policy})"


def _as_json(room: Room | None) -> Json:
    return dict(room._asdict()) if room is not None else None
