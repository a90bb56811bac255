"""MultimodalItem: an image, a video or a sound in a prompt, and its share in blocks' hashes."""

from __future__ import annotations

import bisect
import copy
import struct
from collections.abc import Sequence
from typing import NamedTuple


class MultimodalItem(NamedTuple):
    """A multimodal item in a prompt: it covers the tokens [offset, offset + length)."""

    offset: int
    length: int
    content_hash: bytes


class ItemCursor:
    """Finds the items of one block after the other, in O(blocks + items) for a whole prompt.

    Blocks are asked for in the order of the prompt; `copy` gives a cursor that starts again.
    """

    def __init__(self, items: Sequence[MultimodalItem]) -> None:
        self._items = tuple(item for item in items if item.length > 0)
        self._by_offset = sorted(range(len(self._items)), key=lambda i: self._items[i].offset)
        self._num_begun = 0
        self._present: list[int] = []  # begun and not over, in the order in which they were given

    def __bool__(self) -> bool:
        return bool(self._items)

    def copy(self) -> ItemCursor:
        """Returns a cursor over the same items, before the first block."""
        if not self._items:
            return self  # nothing to move over
        other = copy.copy(self)
        other._num_begun, other._present = 0, []
        return other

    def extras(self, first: int, num_tokens: int) -> bytes:
        """Returns what the items that touch [first, first + num_tokens) add to the block's hash.

        first: never less than in an earlier call.
        """
        while self._num_begun < len(self._items):
            i = self._by_offset[self._num_begun]
            if self._items[i].offset >= first + num_tokens:
                break
            bisect.insort(self._present, i)
            self._num_begun += 1
        if self._present:
            self._present = [i for i in self._present if self._end_of(i) > first]
        return b"".join(_extra(self._items[i], first) for i in self._present)

    def _end_of(self, i: int) -> int:
        return self._items[i].offset + self._items[i].length


def length_prefixed(data: bytes) -> bytes:
    """Returns the data behind its length as little-endian u32."""
    return struct.pack("<I", len(data)) + data


def _extra(item: MultimodalItem, first: int) -> bytes:
    return length_prefixed(item.content_hash + struct.pack("<i", item.offset - first))
