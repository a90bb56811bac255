"""Namespace: the properties that make the stored bytes of two instances interchangeable."""

# Decision: docs/decisions/005-namespace-fields.md
from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

FORMAT_VERSION = 2
HASH_BYTES = 16
_NAMESPACE = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None

SHAPING = (
    *("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"),
    *("partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types"),
    *("attention_chunk_size", "attn_logit_softcapping", "attention_multiplier"),
    *("query_pre_attn_scalar", "rms_norm_eps", "num_experts_per_tok"),
)
"""Fields of a model's configuration that change its KV and are not part of its weights."""


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
    bare_salt: the salt's field if it had no white space at its ends; None if it has none there.
    """

    fields: Mapping[str, Json]
    parts: tuple[Part, ...]
    block_tokens: int
    num_shards: int = 1
    windows: Mapping[int, int] = field(default_factory=dict)
    bare_salt: str | None = None
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        text = _canonical(self.fields).encode()
        object.__setattr__(self, "digest", hashlib.sha256(text).digest()[:HASH_BYTES])

    @classmethod
    def seen(cls, digest: bytes, parts: tuple[Part, ...], block_tokens: int) -> Namespace:
        """Returns a namespace of which only the digest is known, from a stored key.

        For tools that look into a pool: its fields are empty, and its windows are unknown.
        """
        made = cls({}, parts, block_tokens)
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
                text = _salt(value)
                text += f" ({_salt(self.bare_salt)} and white space)" if self.bare_salt else ""
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


def _salt(value: Json) -> str:
    return "#" + _digest(_canonical(value).encode())[:4]


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


def shaping(fields: Mapping[str, Any], *, max_model_len: int | None, **others: Json) -> str:
    """Returns the text for `Layout.rope`: equal texts mean that equal tokens have equal KV.

    fields: those of SHAPING, None for one that the model does not have.
    max_model_len: tokens of the longest prompt; it counts for LongRoPE alone.
    others: more that changes the KV of the engine.
    """
    rope = fields["rope_parameters"] or fields["rope_scaling"] or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        others["max_model_len"] = max_model_len  # selects the factors that K is rotated by
    return canonical({**fields, **others})


def canonical(value: Json) -> str:
    """Returns a value as JSON with sorted keys; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, default=str)
