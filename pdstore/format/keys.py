"""Derives the prefix hashes of a prompt from its tokens, and block keys from prefix hashes.

The format is fixed so that every engine, language and router derives the same keys
(tests/format/vectors/keys.json):

    root    h_-1 = H(namespace | lp(LoRA digest) | lp(cache salt) [| lp(weights digest)])
    block   h_i  = H(h_{i-1} | tokens_i as little-endian int32 | lp(extra) ...)
    key     pds1:<namespace hex>:<group>[.<draft>]:<shard>:<hash hex>[:partial:<n>]

`H` is sha256 cut to 16 bytes. `lp` puts the length of some bytes in front of them, as little-endian
u32. An extra is the content hash of a multimodal item, followed by the item's offset from the
block's first token as little-endian int32.

The KV groups of a draft model have numbers behind the model's own, and then a digest of what the
draft is. So instances with unlike drafts, or with none, share the other groups.

The weights' digest is left out while the weights are those that the namespace names: it is there
after weights were written in place.

A namespace names the properties that must be equal if two instances are to share blocks.
"""

# Decision: docs/decisions/008-partial-tails.md
# Decision: docs/decisions/005-namespace-fields.md
from __future__ import annotations

import enum
import itertools
import json
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple, NewType, TypeAlias, Union, cast

from pdstore.format.continuation import Continuation

FORMAT_VERSION = 2
HASH_BYTES = 16
DRAFT_DIGITS = 16
HEX_ID = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None

SHAPING = (
    *("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"),
    *("partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types"),
    *("attention_chunk_size", "attn_logit_softcapping", "attention_multiplier"),
    *("query_pre_attn_scalar", "rms_norm_eps", "num_experts_per_tok"),
)
"""Fields of a model's configuration that change its KV although its weights stay the same."""
INDEXING = ("index_topk", "index_topk_freq", "index_topk_pattern", "indexer_rope_interleave")
"""Such fields that only models with sparse attention have."""


class Part(NamedTuple):
    """A KV group and a shard: a block is stored as one value for each part."""

    group: int
    shard: int


def digest_in_header(namespace: bytes, draft: str = "") -> bytes:
    """Returns the digest of a namespace that is in the headers of its values.

    draft: what names the draft in a value's key; empty for a value that is not a draft's.
    """
    if not draft:
        return namespace
    return sha256(namespace + draft.encode()).digest()[:HASH_BYTES]


def prefix_of(namespace: str) -> str:
    """Returns the text that begins the keys of a namespace (`Namespace.hex`) and no other keys.

    Raises ValueError for anything but 32 lower-case hex digits.
    """
    if not HEX_ID.fullmatch(namespace):
        raise ValueError(
            f"a namespace is {2 * HASH_BYTES} lower-case hex digits, not {namespace!r}"
        )
    return f"pds1:{namespace}:"


@dataclass(frozen=True)
class Namespace:
    """The properties that must be equal if two instances are to share blocks, and their digest.

    fields: the properties by name, as `Identity.namespace` makes them.
    parts: the (group, shard) pairs whose values together are one block, in key order.
    drafts: what names each KV group of a draft model, by its number: `DRAFT_DIGITS` hex digits.
      Such a group is no part of a block, and is looked up by nobody but a load.
    needs, states: as `Continuation` takes them, by the number of the KV group.
    bare_salt: a digest of the salt after white space at its ends is removed; None if it has none.
    has_pages: values may bring with them what another prompt left behind in the same page or state.
    digest: a digest of `fields`; passed only by callers that know the digest but not the fields.
    """

    fields: Mapping[str, Json]
    parts: tuple[Part, ...]
    block_tokens: int
    num_shards: int = 1
    needs: Mapping[int, int] = field(default_factory=dict)
    states: frozenset[int] = frozenset()
    bare_salt: str | None = None
    has_pages: bool = False
    drafts: Mapping[int, str] = field(default_factory=dict)
    digest: bytes = b""

    def __post_init__(self) -> None:
        text = _canonical(self.fields).encode()
        object.__setattr__(self, "digest", self.digest or sha256(text).digest()[:HASH_BYTES])

    @property
    def hex(self) -> str:
        return self.digest.hex()

    def key_prefix(self, part: Part) -> str:
        """Returns how the keys of a part begin."""
        draft = self.drafts.get(part.group)
        return f"pds1:{self.hex}:{part.group}{f'.{draft}' if draft else ''}:{part.shard}:"

    def header_digest(self, part: Part) -> bytes:
        """Returns the digest that is in the headers of a part's values."""
        return digest_in_header(self.digest, self.drafts.get(part.group, ""))

    @property
    def continuation(self) -> Continuation:
        """Which blocks of each KV group must be there for an engine to go on at a token."""
        return Continuation(self.block_tokens, self.needs, states=self.states)

    @cached_property
    def described(self) -> Mapping[str, str]:
        """Each field as a text of at most 40 characters, which may be sent to other instances.

        Consecutive equal items of a list are shown once, with their number. A text of more than 40
        characters is replaced by a digest. The salt is shown as 16 bits of a digest: enough to see
        most differences, but too few to check a guessed salt.
        """
        described = {}
        for name, value in self.fields.items():
            text = _with_runs(value)
            if name == "salt" and value is not None:
                text = _salt(value)
                text += f" ({_salt(self.bare_salt)} and white space)" if self.bare_salt else ""
            described[name] = text if len(text) <= 40 else "#" + _digest(text.encode())
        return described

    def differences(self, described: Mapping[str, str]) -> list[str]:
        """Returns a line for each field that differs from another instance's `described`."""
        ours = self.described
        return [
            f"{name}: {described.get(name, 'missing')} there, {ours.get(name, 'missing')} here"
            f"{_MEANS.get(name, '')}"
            for name in sorted({*ours, *described})
            if ours.get(name) != described.get(name)
        ]


_MEANS = {
    "format": " (two versions of pdstore: install the same one for both)",
    "block_tokens": " (PDSTORE_BLOCK_TOKENS; of a model with sliding windows or states it is the"
    " engine's block, which the TP size, the dtypes and speculation decide: make them equal)",
    "form": " (states or pages of other types, shapes or order: give both engines the same version,"
    " dtypes, kernels, block size and kind of GPU)",
    "speculation": " (speculation differs: the number of drafted tokens decides the states' shape,"
    " so give both engines the same --speculative-config, or neither)",
}


def _salt(value: Json) -> str:
    return "#" + _digest(_canonical(value).encode())[:4]


def _canonical(value: Json) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _with_runs(value: Json) -> str:
    """Returns a value as text, a list with equal items merged: `32 x ["mla",1,576,576]`."""
    if not isinstance(value, list):
        return _canonical(value)
    runs = [(len(list(run)), text) for text, run in itertools.groupby(map(_canonical, value))]
    return ", ".join(f"{count} x {text}" for count, text in runs)


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:12]


def shaping(fields: Mapping[str, Any], *, max_model_len: int | None, **others: Json) -> str:
    """Returns the text for `Identity.rope`. Equal texts and weights give equal tokens equal KV.

    fields: the model's value for each name in SHAPING and INDEXING; None for a field that it does
      not have.
    max_model_len: the maximum number of tokens of a prompt; used only for LongRoPE.
    others: other properties of the engine that change its KV.
    """
    rope = fields["rope_parameters"] or fields["rope_scaling"] or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        others["max_model_len"] = max_model_len  # LongRoPE chooses K's rotation by it
    named = {n: value for n, value in fields.items() if n not in INDEXING or value is not None}
    return canonical({**named, **others})


def canonical(value: Json) -> str:
    """Returns a value as JSON with sorted keys; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, default=str)


BlockKey = NewType("BlockKey", str)
"""The name of one value in a store: ASCII text that only `pdstore.format` makes."""
POOL_ID_KEY = BlockKey("pds1:pool")
PURGE_PREFIX = "pds1:purge:"
"""The first characters of the keys of purge numbers, which `prefix_of` a namespace never begins."""
_INT32 = tuple(code for code in "iIlL" if array(code).itemsize == 4)

Tokens: TypeAlias = Union[Sequence[int], "array[int]", memoryview]


class Kind(enum.Enum):
    """Kinds of stored values; the kind decides how long a store keeps a value."""

    BLOCK = "block"
    TAIL = "tail"
    HANDOFF = "handoff"
    POOL = "pool"
    PURGE = "purge"


PERMANENT = frozenset({Kind.POOL, Kind.PURGE})
"""Kinds of the values that no store expires or evicts, and that are never encrypted."""
NEVER_REFUSED = PERMANENT | {Kind.HANDOFF}
"""Kinds of small values that a store takes even if nothing has room: others wait for them."""


def kind_of(key: BlockKey) -> Kind:
    """Returns the kind of the value that a key names, from the key's text."""
    if ":partial:" in key:
        return Kind.TAIL
    if ":handoff:" in key:
        return Kind.HANDOFF
    if key.startswith(PURGE_PREFIX):
        return Kind.PURGE
    return Kind.POOL if key == POOL_ID_KEY else Kind.BLOCK


class MultimodalItem(NamedTuple):
    """A multimodal item in a prompt: it covers the tokens [offset, offset + length).

    content_hash: a digest of what the model gets of the item. A name alone that a client may choose
      must not be one: two items of one name would share KV.
    """

    offset: int
    length: int
    content_hash: bytes


class PromptKeys:
    """The names of one prompt's blocks, in order: its full blocks, then its tail if it has one.

    The same object can be given to a save and to a load. `extend` adds tokens without hashing
    again the blocks that were full before.

    Args:
      lora: a digest of the LoRA adapter's weights; empty without a LoRA adapter.
      cache_salt: the request's own salt; empty if the request has none.
      items: the prompt's multimodal items in order of offset.
      weights: a digest of the engine's weights if they were written in place, else empty.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[MultimodalItem] = (),
        weights: bytes = b"",
    ) -> None:
        self.namespace = namespace
        self.block_tokens = namespace.block_tokens
        self.num_tokens = 0
        self._items_of: dict[int, list[MultimodalItem]] = {}  # by block number
        for item in (item for item in items if item.length > 0):
            first = max(0, item.offset // self.block_tokens)
            for block in range(first, (item.offset + item.length - 1) // self.block_tokens + 1):
                self._items_of.setdefault(block, []).append(item)
        root = namespace.digest + length_prefixed(lora) + length_prefixed(cache_salt)
        root += length_prefixed(weights) if weights else b""
        self._root = sha256(root).digest()[:HASH_BYTES]
        self._full: list[bytes] = []
        self._rest = b""  # the tail's tokens, little-endian int32
        self._last = b""  # the last full block's tokens, for `cut`; empty if not known
        self._tail: bytes | None = None

    @classmethod
    def named(cls, namespace: Namespace, hashes: Sequence[bytes]) -> PromptKeys:
        """Returns the names of full blocks from prefix hashes that the engine has computed.

        hashes: a prefix hash of HASH_BYTES for each block, which no other prefix may have.
        """
        keys = cls(namespace)
        keys._full = list(hashes)
        keys.num_tokens = len(hashes) * namespace.block_tokens
        return keys

    def extend(self, token_ids: Tokens) -> PromptKeys:
        """Adds tokens at the end of the prompt; returns this object.

        Raises ValueError for a token id outside [0, 2**31).
        """
        return self._extend(int32_bytes(token_ids))

    def __len__(self) -> int:
        """Number of blocks; the tail counts as one."""
        return len(self._full) + (self._tail is not None)

    def hash_of(self, block: int) -> bytes:
        """Returns the prefix hash of block number `block`. Raises IndexError if there is none."""
        if block < len(self._full):
            return self._full[block]
        if block == len(self._full) and self._tail is not None:
            return self._tail
        raise IndexError(block)

    def hashes(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        """Returns the prefix hashes of blocks `start` to `stop` - 1."""
        tail = [] if self._tail is None else [self._tail]
        return [*self._full, *tail][start:stop]

    def tokens_of(self, block: int) -> int:
        """Returns the number of tokens in a block: `block_tokens`, or fewer in the tail."""
        return min(self.block_tokens, self.num_tokens - block * self.block_tokens)

    def end_of(self, num_blocks: int) -> int:
        """Returns the number of tokens in the first `num_blocks` blocks."""
        return min(num_blocks * self.block_tokens, self.num_tokens)

    def prefix(self, num_tokens: int) -> PromptKeys:
        """Returns a copy that has only the full blocks within the first `num_tokens` tokens.

        The copy also has the tail if `num_tokens` covers the whole prompt. Calling `extend` on the
        original does not change the copy.
        """
        short = PromptKeys.__new__(PromptKeys)  # `copy.copy` takes several times as long
        short.__dict__.update(self.__dict__)
        short._full = self._full[: max(num_tokens, 0) // self.block_tokens]
        if len(short._full) < len(self._full):
            short._last = b""
        if num_tokens < self.num_tokens:
            short._rest = b""
            short._tail = None
        short.num_tokens = len(short._full) * self.block_tokens + len(short._rest) // 4
        return short

    def cut(self, num_tokens: int) -> PromptKeys:
        """Returns the keys of a prompt that consists of only the first `num_tokens` tokens.

        An instance that has only these tokens makes the same keys. Raises ValueError if these
        tokens end before the last block begins, or if the last block's tokens are not known.
        """
        if num_tokens == self.num_tokens:
            return self.prefix(num_tokens)
        first = max(0, len(self) - 1) * self.block_tokens
        tokens = self._rest or self._last
        is_known = len(tokens) == 4 * (self.num_tokens - first)
        if not (is_known and first <= num_tokens < self.num_tokens):
            raise ValueError(f"{num_tokens} of {self.num_tokens} tokens end before the last block")
        return self.prefix(first)._extend(tokens[: 4 * (num_tokens - first)])

    def store_keys(
        self, parts: Sequence[Part], start: int = 0, stop: int | None = None
    ) -> list[BlockKey]:
        """Returns the keys of blocks `start` to `stop` - 1: for each block, one for each part."""
        heads = [self.namespace.key_prefix(part) for part in parts]
        names = map(bytes.hex, self._full[start:stop])
        keys = [head + name for name in names for head in heads]
        has_tail = self._tail is not None and start <= len(self._full)
        if has_tail and (stop is None or stop > len(self._full)):
            assert self._tail is not None
            last = f"{self._tail.hex()}:partial:{len(self._rest) // 4}"
            keys += [head + last for head in heads]
        return cast("list[BlockKey]", keys)  # cheaper than to call BlockKey for each key

    def _extend(self, token_bytes: bytes) -> PromptKeys:
        token_bytes = self._rest + token_bytes
        step = self.block_tokens * 4
        whole = len(token_bytes) - len(token_bytes) % step
        previous = self._full[-1] if self._full else self._root
        extras = b""
        for start in range(0, whole, step):
            if self._items_of:
                extras = self._extras(len(self._full), self.block_tokens)
            block = previous + token_bytes[start : start + step] + extras
            previous = sha256(block).digest()[:HASH_BYTES]
            self._full.append(previous)
        if whole:
            self._last = token_bytes[whole - step : whole]
        self._rest = token_bytes[whole:]
        num_rest = len(self._rest) // 4
        self.num_tokens = len(self._full) * self.block_tokens + num_rest
        self._tail = None
        if num_rest:
            extras = self._extras(len(self._full), num_rest)
            self._tail = sha256(previous + self._rest + extras).digest()[:HASH_BYTES]
        return self

    def _extras(self, block: int, num_tokens: int) -> bytes:
        """Returns the bytes that multimodal items in a block's first tokens add to its hash."""
        first = block * self.block_tokens
        return b"".join(
            length_prefixed(item.content_hash + struct.pack("<i", item.offset - first))
            for item in self._items_of.get(block, ())
            if item.offset < first + num_tokens
        )


def int32_bytes(token_ids: Tokens) -> bytes:
    """Returns token ids as little-endian int32 bytes.

    Raises ValueError for an id that is negative or needs more than 31 bits. Raises TypeError for
    anything but ints.
    """
    if isinstance(token_ids, (bytes, bytearray)):
        raise TypeError("token ids are ints, not bytes")
    if isinstance(token_ids, memoryview) and token_ids.format in _INT32:
        words = array("i", token_ids.tobytes())
    elif isinstance(token_ids, array) and token_ids.typecode in _INT32:
        words = token_ids
    else:
        try:
            words = array("I", token_ids)  # several times as fast as "i"
        except OverflowError as error:
            raise ValueError("a token id does not fit 31 bits") from error
    data = words.tobytes()
    if not data[3::4].isascii():  # the highest bit of an id is set
        raise ValueError("a token id is negative or does not fit 31 bits")
    return data


def length_prefixed(data: bytes) -> bytes:
    """Returns the data with its length in front, as little-endian u32."""
    return struct.pack("<I", len(data)) + data
