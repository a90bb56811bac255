"""Tokens -> prefix hashes -> block keys, within a namespace.

The format is fixed so that every engine, language and router derives the same keys (tests/vectors/keys.json):

    root    h_-1 = H(namespace | lp(LoRA digest) | lp(cache salt))
    block   h_i  = H(h_{i-1} | tokens_i as little-endian int32 | lp(extra) ...)
    key     pds1:<namespace hex>:<group>:<shard>:<hash hex>[:partial:<n>]

`H` is sha256 cut to 16 bytes, or xxh3_128; `lp` is a u32 little-endian length before the bytes. An extra is a
multimodal item's content hash, then the item's offset relative to the block's first token as little-endian int32.
"""

from __future__ import annotations

import enum
import hashlib
import json
import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, Union

import xxhash

from pdstore.types import BlockKey

FORMAT_VERSION = 1
HASH_BYTES = 16
POOL_ID_KEY = BlockKey("pds1:pool")

Json: TypeAlias = Union[str, int, float, bool, None, Sequence["Json"], Mapping[str, "Json"]]
Tokens: TypeAlias = Union[Sequence[int], "array[int]", memoryview]


class Kind(enum.Enum):
    """What a key names, which decides how long a store keeps it."""

    BLOCK = "block"
    TAIL = "tail"
    HANDOFF = "handoff"
    POOL = "pool"  # never expires


def kind_of(key: BlockKey) -> Kind:
    """The kind of a key, from its text."""
    if ":partial:" in key:
        return Kind.TAIL
    if ":handoff:" in key:
        return Kind.HANDOFF
    return Kind.POOL if key == POOL_ID_KEY else Kind.BLOCK


@dataclass(frozen=True)
class Namespace:
    """What must be equal for two instances' bytes to be interchangeable: a JSON document and its digest."""

    fields: Mapping[str, Json]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        text = _canonical(self.fields).encode()
        object.__setattr__(self, "digest", hashlib.sha256(text).digest()[:HASH_BYTES])

    @property
    def hex(self) -> str:
        return self.digest.hex()

    def describe(self) -> dict[str, str]:
        """Each field in at most 40 characters, fit to send to the other instance: a long one is a digest.

        A salt never shows: it is in the fields as a digest already.
        """
        described = {}
        for name, value in self.fields.items():
            text = _canonical(value)
            described[name] = text if len(text) <= 40 else "#" + _digest(text.encode())
        return described

    def differences(self, described: Mapping[str, str]) -> list[str]:
        """One line for each field in which `described` (another instance's `describe()`) differs from this."""
        ours = self.describe()
        return [
            f"{name}: {described.get(name, 'missing')} there, {ours.get(name, 'missing')} here"
            for name in sorted(set(ours) | set(described))
            if ours.get(name) != described.get(name)
        ]


class Item(NamedTuple):
    """A multimodal item in a prompt: it covers the tokens [offset, offset + length)."""

    offset: int
    length: int
    content_hash: bytes


class PromptKeys:
    """The names of one prompt's blocks, in order: its full blocks, then its tail if it has one.

    One object serves save and load. `extend` adds tokens without hashing the old ones again.

    Args:
      namespace: the instance's namespace.
      block_tokens: tokens of a full block.
      algorithm: `sha256` or `xxh3_128`; also a field of the namespace.
      lora: digest of the LoRA adapter's weights; empty for none.
      cache_salt: the request's own salt; empty for none.
      items: multimodal items in order of offset.
    """

    def __init__(
        self,
        namespace: Namespace,
        block_tokens: int,
        *,
        algorithm: str = "sha256",
        lora: bytes = b"",
        cache_salt: bytes = b"",
        items: Sequence[Item] = (),
    ) -> None:
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.num_tokens = 0
        self._hash = _HASHES[algorithm]
        self._items = tuple(items)
        self._root = self._hash(namespace.digest + _prefixed(lora) + _prefixed(cache_salt))
        self._full: list[bytes] = []
        self._rest = b""  # the tail's tokens, little-endian int32
        self._tail: bytes | None = None

    def extend(self, token_ids: Tokens) -> PromptKeys:
        """Adds tokens behind those there are; returns itself. Ids must be in [0, 2**31)."""
        data = self._rest + int32_bytes(token_ids)
        step = self.block_tokens * 4
        whole = len(data) - len(data) % step
        previous = self._full[-1] if self._full else self._root
        if self._items:
            previous = self._extend_with_items(previous, data, step, whole)
        else:
            digest, append = self._hash, self._full.append
            for start in range(0, whole, step):
                previous = digest(previous + data[start : start + step])
                append(previous)
        self._rest = data[whole:]
        self.num_tokens = len(self._full) * self.block_tokens + len(self._rest) // 4
        self._tail = None
        if self._rest:
            first = len(self._full) * self.block_tokens
            self._tail = self._hash(previous + self._rest + self._extras(first, len(self._rest) // 4))
        return self

    def __len__(self) -> int:
        """Number of blocks, the tail included."""
        return len(self._full) + (self._tail is not None)

    def hash_of(self, block: int) -> bytes:
        """The prefix hash that names a block and all before it."""
        if block < len(self._full):
            return self._full[block]
        if block == len(self._full) and self._tail is not None:
            return self._tail
        raise IndexError(block)

    def tokens_of(self, block: int) -> int:
        """How many tokens a block has: `block_tokens`, or fewer for the tail."""
        return min(self.block_tokens, self.num_tokens - block * self.block_tokens)

    def end_of(self, num_blocks: int) -> int:
        """How many tokens the first `num_blocks` blocks have."""
        return min(num_blocks * self.block_tokens, self.num_tokens)

    def key(self, block: int, group: int, shard: int) -> BlockKey:
        """The store key of one group and shard of a block."""
        text = f"pds1:{self.namespace.hex}:{group}:{shard}:{self.hash_of(block).hex()}"
        tokens = self.tokens_of(block)
        return BlockKey(text if tokens == self.block_tokens else f"{text}:partial:{tokens}")

    def keys(self, parts: Sequence[tuple[int, int]], start: int = 0, stop: int | None = None) -> list[BlockKey]:
        """Store keys of the blocks start..stop: block-major, then `parts`, the (group, shard) pairs in order."""
        stop = len(self) if stop is None else stop
        heads = [f"pds1:{self.namespace.hex}:{group}:{shard}:" for group, shard in parts]
        keys = [head + h.hex() for h in self._full[start:stop] for head in heads]
        if self._tail is not None and start <= len(self._full) < stop:
            last = f"{self._tail.hex()}:partial:{len(self._rest) // 4}"
            keys += [head + last for head in heads]
        return keys  # type: ignore[return-value]  # a NewType costs a call per key

    def _extend_with_items(self, previous: bytes, data: bytes, step: int, whole: int) -> bytes:
        first = len(self._full) * self.block_tokens
        for start in range(0, whole, step):
            extras = self._extras(first, self.block_tokens)
            previous = self._hash(previous + data[start : start + step] + extras)
            self._full.append(previous)
            first += self.block_tokens
        return previous

    def _extras(self, first: int, num_tokens: int) -> bytes:
        """What the items that touch the tokens [first, first + num_tokens) add to their block's hash."""
        return b"".join(
            _prefixed(item.content_hash + struct.pack("<i", item.offset - first))
            for item in self._items
            if item.offset < first + num_tokens and first < item.offset + item.length
        )


class Attempt(NamedTuple):
    """The random 128-bit name of one hand-off, within a namespace."""

    namespace: Namespace
    id: bytes

    @classmethod
    def new(cls, namespace: Namespace) -> Attempt:
        return cls(namespace, secrets.token_bytes(HASH_BYTES))

    def marker(self, shard: int, state: str) -> BlockKey:
        """The key whose existence says that a shard of this hand-off is `started`, `done` or `failed`."""
        return BlockKey(f"pds1:{self.namespace.hex}:handoff:{self.id.hex()}:{shard}:{state}")


def int32_bytes(token_ids: Tokens) -> bytes:
    """Token ids as little-endian int32 bytes. An int32 buffer (array, numpy, memoryview) is taken as it is.

    Raises ValueError for an id that is negative or does not fit 31 bits.
    """
    if isinstance(token_ids, (array, memoryview)) and token_ids.itemsize == 4:
        words = array("i", bytes(token_ids))
    else:
        try:
            words = array("i", token_ids)
        except OverflowError as error:
            raise ValueError("a token id does not fit 31 bits") from error
    if len(words) and min(words) < 0:
        raise ValueError(f"negative token id {min(words)}")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256(data: bytes, _new: Callable[[bytes], hashlib._Hash] = hashlib.sha256) -> bytes:
    return _new(data).digest()[:HASH_BYTES]


_HASHES: Mapping[str, Callable[[bytes], bytes]] = {"sha256": _sha256, "xxh3_128": _xxh3_128}


def _prefixed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
