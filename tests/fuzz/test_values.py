"""Whatever a pool holds: values, envelopes, markers and the pool's id are right or refused."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st

from pdstore.errors import Reason, StoreError
from pdstore.format import block
from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import POOL_ID_KEY
from pdstore.store.connect import read_pool_id
from pdstore.store.memory import MemoryStore
from pdstore.testing import fresh_keys
from pdstore.testing.values import put
from tests.fuzz.search import num_examples, search
from tests.support.kv import POISON, Instance
from tests.support.pool_kit import D_BLOCKS, assert_loaded, save

HEADER = block.Header(0, 0, 0, 1, 64, 100, bytes(range(16)), bytes(range(16, 32)))
[KEY] = fresh_keys(1)
TOKENS = list(range(130))


def right_value() -> bytearray:
    value = bytearray(block.HEADER_BYTES + HEADER.payload_bytes)
    block.seal(memoryview(value), HEADER)
    return value


def damaged(right: bytearray) -> st.SearchStrategy[bytes]:
    """A right value of which some bytes are others, cut or longer; or nothing like it."""
    edits = st.lists(st.tuples(st.integers(0, len(right) - 1), st.integers(1, 255)), max_size=4)
    lengths = st.integers(-len(right), 40)

    def apply(edits: list[tuple[int, int]], length: int) -> bytes:
        value = bytearray(right)
        for at, flips in edits:
            value[at] ^= flips
        return bytes(value + bytes(length) if length >= 0 else value[:length])

    return st.builds(apply, edits, st.just(0) | lengths) | st.binary(max_size=300)


@num_examples
def test_a_value_is_the_right_one_or_is_refused(num_examples: int) -> None:
    right = bytes(right_value())

    def check(value: bytes) -> None:
        view = memoryview(bytearray(value))
        assert (block.verify(view, HEADER) is None) == (value == right)
        header = block.read_header(view)
        assert header is None or block.verify(view, header) is None
        if len(value) == len(right):
            assert block.is_right(view, block.start_of(HEADER)) == (value == right)

    search(num_examples, check, value=damaged(right_value()))


@num_examples
def test_an_envelope_is_the_right_one_or_is_refused(num_examples: int) -> None:
    envelopes, value = Envelopes([bytes(32)]), memoryview(bytes(100))
    right = bytearray(len(value) + ENVELOPE_BYTES)
    envelopes.encrypt(KEY, value, memoryview(right))
    kept = bytes(right)

    def check(envelope: bytes) -> None:
        if len(envelope) <= ENVELOPE_BYTES:  # a store refuses other lengths itself
            return
        into = memoryview(bytearray(len(envelope) - ENVELOPE_BYTES))
        wrong = envelopes.decrypt(KEY, memoryview(bytearray(envelope)), into)
        assert wrong in (None, Reason.OTHER_SEAL, Reason.FORGED)
        assert (wrong is None) == (envelope == kept)

    search(num_examples, check, envelope=damaged(right))


@num_examples
def test_the_pools_id_is_read_or_replaced(num_examples: int) -> None:
    def check(value: bytes) -> None:
        store = MemoryStore()
        if value:
            put(store, [POOL_ID_KEY], [value])
        with contextlib.suppress(StoreError):  # one of another length is the pool's to remove
            assert len(read_pool_id(store)) == 16

    search(num_examples, check, value=damaged(bytearray(64)) | st.binary(min_size=64, max_size=64))


@num_examples
def test_the_content_of_a_marker_changes_no_byte(num_examples: int) -> None:
    """A marker is there or not: D verifies every block itself."""
    store = MemoryStore()
    with contextlib.closing(Instance(store)) as p, contextlib.closing(Instance(store, POISON)) as d:
        save(p, TOKENS)

        def check(value: bytes, num_tokens: int) -> None:
            keys = p.cache.keys(TOKENS[:num_tokens])
            handoff, params = p.cache.announce(keys)
            put(store, [handoff.done(p.namespace, 0)], [value])
            found = d.cache.lookup(keys, params).wait(10)
            for cache in d.caches:
                cache.fill_(POISON)
            result = d.pool.load(found.keys, D_BLOCKS).wait(10)
            assert result.num_tokens == found.num_tokens == num_tokens - num_tokens % 64
            assert_loaded(p, d, result.num_tokens)

        lengths = st.sampled_from([1, 64, 100, 129])
        values = st.binary(min_size=1, max_size=200)
        search(num_examples // 6, check, value=values, num_tokens=lengths)
