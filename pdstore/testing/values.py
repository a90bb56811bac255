"""Keys and values for tests: each value follows from its key, so any process can check it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store, is_count


def fresh_keys(count: int) -> list[BlockKey]:
    """Returns block keys that no other test uses."""
    namespace = secrets.token_hex(16)
    return [BlockKey(f"pds1:{namespace}:0:0:{i:032x}") for i in range(count)]


def content(key: str, size: int, version: int = 0) -> bytes:
    """Returns the bytes of a key's value; every part and every version differ."""
    return random.Random(f"{key}#{version}").randbytes(size)


def empty_slots(sizes: Sequence[int], *, slot_bytes: int | None = None) -> Slots:
    """Returns slots in a new buffer, filled with 0xEE."""
    slot_bytes = max([*sizes, 1]) if slot_bytes is None else slot_bytes
    view = memoryview(bytearray(b"\xee" * (slot_bytes * len(sizes))))
    return Slots(view, slot_bytes, range(len(sizes)), sizes)


def filled_slots(values: Sequence[bytes], *, slot_bytes: int | None = None) -> Slots:
    """Returns slots that hold these values."""
    slots = empty_slots([len(value) for value in values], slot_bytes=slot_bytes)
    for i, value in enumerate(values):
        slots.value(i)[:] = value
    return slots


def put(store: Store, keys: Sequence[BlockKey], values: Sequence[bytes]) -> int:
    """Puts values; returns the store's count, which must be one."""
    n = store.put(keys, filled_slots(values))
    assert is_count(n, len(keys)), f"put says {n!r} of {len(keys)}"
    return n


def get(store: Store, keys: Sequence[BlockKey], sizes: Sequence[int]) -> list[bytes]:
    """Gets values; returns those of the leading keys that were there."""
    slots = empty_slots(sizes)
    n = store.get(keys, slots)
    assert is_count(n, len(keys)), f"get says {n!r} of {len(keys)}"
    return [bytes(slots.value(i)) for i in range(n)]


def assert_values(found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Compares values, with a short message: a diff of megabytes helps nobody."""
    for i, (value, right) in enumerate(zip(found, expected, strict=False)):
        if value != right:
            pairs = enumerate(zip(value, right, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(value), len(right)))
            raise AssertionError(
                f"value {i} of {len(expected)} is wrong from byte {same} on:"
                f" {len(value)} bytes, {len(right)} expected"
            )
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} values, {len(expected)} expected")
