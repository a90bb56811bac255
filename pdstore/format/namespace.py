"""Namespace: the properties that make the stored bytes of two instances interchangeable."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

FORMAT_VERSION = 2
HASH_BYTES = 16
_NAMESPACE = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None


class Part(NamedTuple):
    """A KV group and a shard: a block is stored as one value for each part."""

    group: int
    shard: int


def prefix_of(namespace: str) -> str:
    """Returns the prefix that the keys of a namespace have, and no others; from its `hex`.

    Raises ValueError for anything but 32 lower-case hex digits.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(
            f"a namespace is {2 * HASH_BYTES} lower-case hex digits, not {namespace!r}"
        )
    return f"pds1:{namespace}:"


@dataclass(frozen=True)
class Namespace:
    """The properties that make bytes interchangeable if they are equal, and their digest.

    fields: the document; made by `Layout.namespace`.
    parts: the (group, shard) pairs whose values together are one block, in key order.
    windows: tokens of the sliding window of each KV group that has one.
    """

    fields: Mapping[str, Json]
    parts: tuple[Part, ...]
    block_tokens: int
    algorithm: str = "sha256"
    num_shards: int = 1
    windows: Mapping[int, int] = field(default_factory=dict)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        text = _canonical(self.fields).encode()
        object.__setattr__(self, "digest", hashlib.sha256(text).digest()[:HASH_BYTES])

    @classmethod
    def seen(
        cls, digest: bytes, parts: tuple[Part, ...], block_tokens: int, algorithm: str
    ) -> Namespace:
        """Returns a namespace of which only the digest is known, from a stored key.

        For tools that look into a pool: its fields are empty, and its windows are unknown.
        """
        made = cls({}, parts, block_tokens, algorithm)
        object.__setattr__(made, "digest", digest)
        return made

    @property
    def hex(self) -> str:
        return self.digest.hex()

    def describe(self) -> dict[str, str]:
        """Returns each field in at most 40 characters, fit to be sent to the other instance.

        Equal layers in a row are shown once with their number, and what is still too long as a
        digest. Of the salt only 16 bits show: enough to see a difference, not to guess it.
        """
        return dict(self._described)

    @cached_property
    def _described(self) -> Mapping[str, str]:
        described = {}
        for name, value in self.fields.items():
            text = _with_runs(value)
            if name == "salt" and value is not None:
                text = "#" + _digest(text.encode())[:4]
            described[name] = text if len(text) <= 40 else "#" + _digest(text.encode())
        return described

    def differences(self, described: Mapping[str, str]) -> list[str]:
        """Returns a line for each field that differs from another instance's `describe()`."""
        ours = self.describe()
        return [
            f"{name}: {described.get(name, 'missing')} there, {ours.get(name, 'missing')} here"
            for name in sorted({*ours, *described})
            if ours.get(name) != described.get(name)
        ]


def _canonical(value: Json) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _with_runs(value: Json) -> str:
    """Returns a value as text; a list by its runs of equal items: `32 x ["mla",1,576,576]`."""
    if not isinstance(value, list):
        return _canonical(value)
    runs = [(len(list(run)), text) for text, run in itertools.groupby(map(_canonical, value))]
    return ", ".join(f"{count} x {text}" for count, text in runs)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
