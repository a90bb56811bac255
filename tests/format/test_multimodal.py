"""Multimodal items: those of each block, however they overlap, in time that does not multiply."""

from __future__ import annotations

import hashlib
import struct
import sys

from hypothesis import given
from hypothesis import strategies as st

from pdstore.format.keys import MultimodalItem, PromptKeys, length_prefixed
from pdstore.format.namespace import Namespace, Part

ITEMS = st.lists(
    st.builds(
        MultimodalItem, st.integers(-5, 60), st.integers(0, 30), st.binary(min_size=1, max_size=2)
    ),
    max_size=8,
)


def extras_of(items, first: int, num_tokens: int) -> bytes:
    """The format's definition, item by item."""
    return b"".join(
        length_prefixed(item.content_hash + struct.pack("<i", item.offset - first))
        for item in items
        if item.length > 0
        and item.offset < first + num_tokens
        and first < item.offset + item.length
    )


@given(ITEMS, st.integers(1, 40))
def test_every_block_has_the_items_that_touch_it_in_the_order_given(items, num_tokens):
    namespace = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
    keys = PromptKeys(namespace, items=items)
    previous = hashlib.sha256(namespace.digest + bytes(8)).digest()[:16]
    for stop in range(num_tokens + 1):  # a tail that grows to a block
        keys.extend([7] if stop else [])
        for block in range(len(keys)) if stop == num_tokens else ():
            size = keys.tokens_of(block)
            tokens = struct.pack("<i", 7) * size
            extras = extras_of(items, 4 * block, size)
            previous = hashlib.sha256(previous + tokens + extras).digest()[:16]
            assert keys.hash_of(block) == previous


@given(ITEMS, st.integers(0, 40), st.integers(0, 40))
def test_a_prefix_that_is_extended_differently_has_its_own_items(items, num_tokens, more):
    namespace = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
    keys = PromptKeys(namespace, items=items).extend(range(40))
    short = keys.prefix(num_tokens)
    again = PromptKeys(namespace, items=items).extend(range(short.num_tokens))
    extended = (short.extend(range(more)), again.extend(range(more)))
    assert extended[0].store_keys(namespace.parts) == extended[1].store_keys(namespace.parts)


def num_lines(num_blocks: int, num_items: int) -> int:
    """Lines and comprehension steps that Python runs for a prompt; a time that no load disturbs."""
    items = [MultimodalItem(8 * i, 4, b"h") for i in range(num_items)]
    keys = PromptKeys(Namespace({"n": 1}, (Part(0, 0),), block_tokens=16), items=items)
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += 1
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        keys.extend(range(16 * num_blocks))
    finally:
        sys.settrace(before)
    return count
