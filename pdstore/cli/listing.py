"""`pdstore ls` and `inspect`: they list and read the values of a pool, and count them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from pdstore.cli.answer import Answer, muted, size, table
from pdstore.cli.output import age, counted
from pdstore.cli.progress import scanned
from pdstore.errors import BadValue, ConfigError, Reason, StoreError, reason_of
from pdstore.format import block
from pdstore.format.block import Header
from pdstore.format.keys import (
    DRAFT_DIGITS,
    PERMANENT,
    POOL_ID_KEY,
    PURGE_PREFIX,
    BlockKey,
    Json,
    Kind,
    Part,
    digest_in_header,
    kind_of,
)
from pdstore.settings import Settings, read_settings
from pdstore.store import open_store
from pdstore.store.base import MAX_KEY_CHARS, Slots, Store
from pdstore.store.connect import place_of
from pdstore.store.optional import ALL_KEYS, ListsValues, Room, StoredValue, TellsRoom, tiers_of
from pdstore.store.seal import seal_store
from pdstore.store.wrappers import WrapperStore

# Anyone who can write may make other keys.
_HEX = "([0-9a-f]{32})"
_NUMBER = "([0-9]{1,9})"
_DRAFT = f"(?:[.]([0-9a-f]{{{DRAFT_DIGITS}}}))?"
_BLOCK = re.compile(f"pds1:{_HEX}:{_NUMBER}{_DRAFT}:{_NUMBER}:{_HEX}(?::partial:{_NUMBER})?")
_MARKER = re.compile(f"pds1:{_HEX}:handoff:{_HEX}:{_NUMBER}:[a-z0-9]{{1,20}}")
_PURGE = re.compile(f"{PURGE_PREFIX}{_HEX}:{_NUMBER}")
_MAX_BYTES = 4 << 30  # a longer value is not read: it may be a file without end
_MAX_PARTS = 4096  # no layout has so many, but keys in a pool may name any part


class OpenPool(NamedTuple):
    """A store, and `lists`, which lists its values in their stored form, even if encrypted.

    tiers: the stores of its tiers; the store alone if it has none.
    silent: lines about lower tiers that did not answer when values were listed, by tier.
    """

    settings: Settings
    store: Store
    lists: ListsValues | None
    tiers: Sequence[Store]
    silent: dict[str, str]

    def listed_values(self, prefix: str = ALL_KEYS) -> list[StoredValue]:
        """Lists values, of several tiers those of each that answers, and a key once.

        Raises ConfigError for a store that cannot list them, and StoreError.
        """
        return values_once(self.values_by_tier(prefix))

    def values_by_tier(self, prefix: str = ALL_KEYS) -> list[list[StoredValue]]:
        """Lists the values of each tier; none of a lower tier that does not answer.

        Raises as `listed_values` does.
        """
        if self.lists is None:
            raise ConfigError(
                f"{self.store.label} cannot list its values: no ListsValues (see docs)"
            )
        found = []
        for number, tier in enumerate(self.tiers):
            lists = tier.optional(ListsValues)
            values: list[StoredValue] = []
            try:
                if lists is not None:
                    values = list(scanned(lists.stored_values(prefix), f"values of {tier.label}"))
            except StoreError as error:
                if number == 0:  # without the first tier, the pool is down
                    raise
                self.silent[tier.label] = f"tier {number} did not answer: {error}"
            found.append(values)
        return found

    def room_of(self, tier: Store) -> Room | None:
        """Returns how full a tier is; None if it does not tell. Raises StoreError."""
        tells = tier.optional(TellsRoom) if tier.label not in self.silent else None
        return tells.room() if tells is not None else None

    def read(self, key: BlockKey) -> Header | None:
        """Reads a value and returns its header; None if it is missing.

        Raises BadValue if the value is damaged or cannot be decrypted, and StoreError.
        """
        length = self.lists.length_of(key) if self.lists else None
        if length is None:
            return None
        if length > _MAX_BYTES:
            raise BadValue(f"it is {size(length)} long, which no value of pdstore's is")
        if isinstance(self.store, WrapperStore) and kind_of(key) not in PERMANENT:
            length -= self.store.added_bytes
        header = None
        if length > 0:
            room = -(-length // 4096) * 4096
            slots = Slots(self.store.allocate(room), room, [0], [length])
            if self.store.get([key], slots) == 0:
                return None
            header = block.read_header(slots.value(0))
        if header is None:
            raise BadValue("its checksum is wrong")
        return header


def values_once(by_tier: Sequence[Iterable[StoredValue]]) -> list[StoredValue]:
    """Returns each value once, as the fastest tier that has it lists it."""
    found: dict[BlockKey, StoredValue] = {}
    for values in by_tier:
        found = {**{value.key: value for value in values}, **found}
    return list(found.values())


@contextmanager
def open_pool(url: str | None) -> Iterator[OpenPool]:
    """Opens the store at a URL, or at PDSTORE_STORE, and closes it at the end.

    Raises StoreError, and ConfigError, for example if the directory or arena does not exist.
    """
    settings = read_settings(**({"store": url} if url else {}))
    missing = (each.missing_path for each in place_of(settings.store, settings).tiers)
    path = next(filter(None, missing), None)
    if path is not None:  # opening it would create a pool, such as an arena of the default size
        raise ConfigError(
            f"there is no pool in {path} yet: the first P or D makes it; if they run, give"
            " PDSTORE_STORE or --store the URL that they have"
        )
    plain = open_store(settings.store, settings)
    store = seal_store(plain, settings)
    try:
        yield OpenPool(settings, store, plain.optional(ListsValues), tiers_of(plain), {})
    finally:
        store.close()


class StoredKey(NamedTuple):
    """The fields of a key.

    name: a block's prefix hash, a marker's hand-off id, or a purge number.
    num_tokens: tokens of a tail; None for a whole block, because its key does not say.
    draft: what names the draft model whose KV it is; empty for the model's own.
    """

    kind: Kind
    namespace: str
    group: int = 0
    shard: int = 0
    name: str = ""
    num_tokens: int | None = None
    draft: str = ""

    @classmethod
    def parsed(cls, key: BlockKey) -> StoredKey | None:
        """Parses a key; returns None for a key that pdstore does not make."""
        if key == POOL_ID_KEY:
            return cls(Kind.POOL, "")
        if block := _BLOCK.fullmatch(key):
            namespace, group, draft, shard, name, tokens = block.groups()
            num_tokens = int(tokens) if tokens else None
            kind, of_draft = kind_of(key), draft or ""
            return cls(kind, namespace, int(group), int(shard), name, num_tokens, of_draft)
        if marker := _MARKER.fullmatch(key):
            namespace, name, shard = marker.groups()
            return cls(Kind.HANDOFF, namespace, 0, int(shard), name)
        if purge := _PURGE.fullmatch(key):
            return cls(Kind.PURGE, purge[1], name=purge[2])
        return None


@dataclass
class NamespaceUse:
    """Counts of the values that a pool has of one namespace.

    youngest_s, oldest_s: the shortest and the longest time, in seconds, for which a value was not
      used; None if the store does not tell.
    sample: a value of a whole block, whose header has the block size.
    drafts: how many values there are of each draft model, which are no part of a block.
    """

    hex: str
    num_bytes: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    parts: set[Part] = field(default_factory=set)
    youngest_s: float | None = None
    oldest_s: float | None = None
    sample: StoredValue | None = None
    drafts: Counter[str] = field(default_factory=Counter)

    @property
    def num_values(self) -> int:
        return sum(self.counts.values())

    def add(self, value: StoredValue, key: StoredKey) -> None:
        self.num_bytes += value.num_bytes
        self.counts[key.kind] += 1
        if key.draft:
            self.drafts[key.draft] += 1
        elif key.kind in (Kind.BLOCK, Kind.TAIL) and len(self.parts) < _MAX_PARTS:
            self.parts.add(Part(key.group, key.shard))
        if not key.draft and key.kind is Kind.BLOCK and value.num_bytes <= _MAX_BYTES:
            self.sample = value
        if value.age_s is not None:  # 0 is an age: redis tells whole seconds
            before = (self.youngest_s, self.oldest_s)
            known_s = [value.age_s, *(each for each in before if each is not None)]
            self.youngest_s = min(known_s)
            self.oldest_s = max(known_s)


def survey(values: Iterable[StoredValue]) -> list[NamespaceUse]:
    """Counts values by namespace, the largest first.

    The pool's id is in no namespace. Purge numbers do not count: a purge does not forget them.
    """
    uses: dict[str, NamespaceUse] = {}
    for value in values:
        key = StoredKey.parsed(value.key)
        if key is not None and key.kind not in PERMANENT:
            uses.setdefault(key.namespace, NamespaceUse(key.namespace)).add(value, key)
    return sorted(uses.values(), key=lambda use: -use.num_bytes)


_UNREADABLE = {
    Reason.OTHER_SEAL: "sealed with a key that is not in PDSTORE_SEAL_KEY_FILE",
    Reason.FORGED: "damaged or forged: its seal is broken",
}
_FOREIGN = "foreign: whole, but of another key, and nobody will use it"
DIGITS = 12
"""Number of hex digits of a namespace that are shown: enough to tell a pool's namespaces apart."""


def ls(url: str | None, prefix: str, limit: int) -> Answer:
    """Lists the values whose key begins with `prefix`, those used last first.

    limit: the maximum number of lines; 0 for all.
    """
    with open_pool(url) as pool:
        values = pool.listed_values(ALL_KEYS + prefix.removeprefix(ALL_KEYS))
        label = pool.store.label
        silent = list(pool.silent.values())
    youngest = nsmallest(limit or len(values), values, key=_by_use)
    rows = [_line(v) for v in youngest]
    total = sum(value.num_bytes for value in values)
    note = f"{counted(len(values), 'value')}, {size(total)}"
    if len(youngest) < len(values):
        note += f"; the {len(youngest)} used last are shown (--limit 0 for all)"
    document: list[Json] = [
        {"key": v.key, "bytes": v.num_bytes, "age_s": v.age_s, "kind": _kind(v)} for v in youngest
    ]
    return Answer(
        {
            "store": label,
            "num_values": len(values),
            "bytes": total,
            "values": document,
            "problems": [*silent],
        },
        [
            table([">used", ">size", "kind", "namespace", "group:shard:name"], rows),
            muted(note),
            *silent,
        ],
        status=int(bool(silent)),
    )


def _by_use(value: StoredValue) -> tuple[float, str]:
    """Sorts values used last first, and those whose age is not known last."""
    return inf if value.age_s is None else value.age_s, value.key


def _kind(value: StoredValue) -> str:
    key = StoredKey.parsed(value.key)
    return "?" if key is None else key.kind.value


def _line(value: StoredValue) -> list[str]:
    _, _, name = value.key.partition(":")
    if (purge := _PURGE.fullmatch(value.key)) is not None:
        name = f"{purge[1]}:{purge[2]}"
    namespace, _, rest = name.partition(":")
    shown = [namespace[:DIGITS], rest[:MAX_KEY_CHARS]] if rest else ["", name[:MAX_KEY_CHARS]]
    return [age(value.age_s), size(value.num_bytes), _kind(value), *shown]


def inspect(url: str | None, text: str) -> Answer:
    """Reads one value and compares its header with its key. Status 1 if it is missing or wrong.

    text: a whole key, or a text that no other key contains.
    Raises ConfigError.
    """
    with open_pool(url) as pool:
        listed = _value_of(pool, text)
        key = listed.key if listed else BlockKey(text)
        stored = StoredKey.parsed(key)
        if stored is None:
            raise ConfigError(
                f"{text!r} is in no key of pdstore's in {pool.store.label}: `pdstore ls` shows them"
            )
        header = None
        try:
            header = pool.read(key)
            verdict = _verdict(stored, header)
        except BadValue as error:
            why = _UNREADABLE.get(reason_of(error), f"damaged: {error}")
            verdict = f"{why}, and nobody will use it"
    facts: dict[str, Json] = {"key": key, "kind": stored.kind.value, "verdict": verdict}
    if listed is not None:
        facts |= {"bytes": listed.num_bytes, "age_s": listed.age_s}
    for name, value in header._asdict().items() if header else ():
        facts[name] = value.hex() if isinstance(value, bytes) else value
    rows = [[name, _shown(name, value)] for name, value in facts.items()]
    answer = Answer(facts, [table(["", ""], rows)], status=int(verdict != "right"))
    answer.shown += pool.silent.values()
    return answer


def _value_of(pool: OpenPool, text: str) -> StoredValue | None:
    """Returns the value whose key is `text`, or the only one whose key contains it; else None.

    Raises ConfigError if several keys contain `text` and none is equal to it.
    """
    meant = [value for value in pool.listed_values() if text in value.key]
    exact = [value for value in meant if value.key == text]
    if len(meant) > 1 and not exact:
        raise ConfigError(f"{len(meant)} keys have {text!r} in them, {meant[0].key} is one")
    return next(iter(exact or meant), None)


def _verdict(stored: StoredKey, header: Header | None) -> str:
    if header is None:
        return "missing"
    if stored.kind is Kind.PURGE:
        same = header.namespace.hex() == stored.namespace
        return "right" if same else _FOREIGN
    tokens = header.num_tokens if stored.num_tokens is None else stored.num_tokens
    namespace = digest_in_header(bytes.fromhex(stored.namespace), stored.draft)
    same = stored.kind is Kind.POOL or (
        (header.namespace, header.prefix_hash.hex()) == (namespace, stored.name)
        and (header.group, header.shard, header.num_tokens) == (stored.group, stored.shard, tokens)
    )
    return "right" if same else _FOREIGN


def _shown(name: str, value: Json) -> str:
    if name == "age_s":
        return f"{age(value if isinstance(value, int | float) else None)} since its last use"
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,} ({size(value)})"
    return str(value)
