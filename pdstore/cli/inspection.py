"""`pdstore inspect`: one stored value, its header and whether it is right."""

from __future__ import annotations

from pdstore.cli.answer import Answer, busy, table
from pdstore.cli.open_pool import Found, OpenPool, open_pool
from pdstore.cli.quantity import age, size
from pdstore.cli.stored_key import StoredKey
from pdstore.errors import ConfigError
from pdstore.format.keys import BlockKey, Kind
from pdstore.format.namespace import Json
from pdstore.outcome import Reason
from pdstore.store.optional import StoredValue

_UNREADABLE = {
    Reason.CORRUPT: "damaged: its checksum is wrong",
    Reason.OTHER_SEAL: "sealed with a key that is not in PDSTORE_SEAL_KEY_FILE",
    Reason.FORGED: "damaged or forged: its seal is broken",
}


def inspect(url: str | None, text: str) -> Answer:
    """Reads one value and compares its header with its key. Status 1 if it is missing or wrong.

    text: a key, or a piece that only one key has.
    Raises ConfigError.
    """
    with open_pool(url) as pool:
        listed = _meant(pool, text)
        key = listed.key if listed else BlockKey(text)
        said = StoredKey.of(key)
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


def _meant(pool: OpenPool, text: str) -> StoredValue | None:
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
