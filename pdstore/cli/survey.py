"""Survey: the values of a pool, counted by namespace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdstore.cli.stored_key import StoredKey
from pdstore.format.keys import Kind
from pdstore.format.namespace import Part
from pdstore.store.optional import StoredValue

_MOST_PARTS = 4096  # no layout has as many, and whoever may write to a pool may name any


@dataclass
class NamespaceUse:
    """The values of one namespace in the pool, counted.

    youngest_s, oldest_s: seconds since the last use; None where the store does not tell.
    sample: the key of one whole block, from which the block size can be read.
    """

    hex: str
    num_bytes: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    parts: set[Part] = field(default_factory=set)
    youngest_s: float | None = None
    oldest_s: float | None = None
    sample: StoredValue | None = None

    @property
    def num_values(self) -> int:
        return sum(self.counts.values())

    def add(self, value: StoredValue, key: StoredKey) -> None:
        self.num_bytes += value.num_bytes
        self.counts[key.kind] += 1
        if key.kind in (Kind.BLOCK, Kind.TAIL) and len(self.parts) < _MOST_PARTS:
            self.parts.add(Part(key.group, key.shard))
        if key.kind is Kind.BLOCK:
            self.sample = value
        if value.age_s is not None:
            self.youngest_s = min(value.age_s, self.youngest_s or value.age_s)
            self.oldest_s = max(value.age_s, self.oldest_s or value.age_s)


def survey(values: Iterable[StoredValue]) -> list[NamespaceUse]:
    """Counts values by namespace, the largest first; the pool's own id belongs to none."""
    uses: dict[str, NamespaceUse] = {}
    for value in values:
        key = StoredKey.of(value.key)
        if key is not None and key.namespace:
            uses.setdefault(key.namespace, NamespaceUse(key.namespace)).add(value, key)
    return sorted(uses.values(), key=lambda use: -use.num_bytes)
