"""What a job moves: values of a prompt's blocks, with key, header and place in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdstore import block
from pdstore.keys import Part, PromptKeys
from pdstore.layout import Layout
from pdstore.swap import Piece
from pdstore.types import BlockKey


class Value(NamedTuple):
    """One part of one block."""

    number: int  # of the block in its prompt
    part: Part
    key: BlockKey
    header: block.Header
    block_ids: Sequence[int]  # the engine blocks that hold the block's tokens

    @property
    def size(self) -> int:
        """Bytes of the stored value."""
        return block.HEADER_BYTES + self.header.payload_bytes

    def piece(self, value: memoryview, before: int = 0) -> Piece:
        """The block copy between this value's bytes and the paged cache.

        before: tokens of the block that a scatter leaves alone.
        """
        payload = value[block.HEADER_BYTES :]
        return Piece(self.part, self.block_ids, self.header.num_tokens, before, payload)


def values_of(
    layout: Layout, keys: PromptKeys, block_ids: Sequence[int], first_block: int
) -> list[Value]:
    """The values that this rank owns of the blocks from `first_block` on, in key order."""
    parts = layout.owned_parts
    per_block = layout.block_tokens // layout.engine_block_tokens
    names = iter(keys.keys(parts, first_block))
    values = []
    for number in range(first_block, len(keys)):
        num_tokens = keys.tokens_of(number)
        used = -(-num_tokens // layout.engine_block_tokens)
        ids = block_ids[number * per_block : number * per_block + used]
        for part in parts:
            header = block.Header(
                flags=block.FLAG_TAIL if num_tokens < layout.block_tokens else 0,
                group=part.group,
                shard=part.shard,
                num_shards=layout.shards_of(part.group),
                num_tokens=num_tokens,
                payload_bytes=layout.payload_bytes(part, num_tokens),
                namespace=keys.namespace.digest,
                prefix_hash=keys.hash_of(number),
            )
            values.append(Value(number, part, next(names), header, ids))
    return values


def bytes_of(layout: Layout, keys: PromptKeys, first_block: int) -> int:
    """Payload bytes of `values_of(...)`, without making them."""
    num_tokens = keys.num_tokens - min(first_block * layout.block_tokens, keys.num_tokens)
    return sum(layout.payload_bytes(part, num_tokens) for part in layout.owned_parts)
