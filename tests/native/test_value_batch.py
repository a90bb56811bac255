"""ValueBatch: all values of a call are moved, or it says so and nothing is held."""

from __future__ import annotations

import time
from array import array

import pytest

from pdstore.errors import LayoutError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.keys import Kind
from pdstore.format.layout import Layout
from pdstore.native.arena import text_of
from pdstore.native.value_batch import ValueBatch
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import fresh_keys
from pdstore.worker.swap.base import BlockCopy
from pdstore.worker.swap.native import NativeSwap, UnplacedCopy
from tests.support.kv import LAYERS, caches_of, settings_of

TOKENS = 16
KINDS = [Kind.BLOCK] * 2
NOTHING = ([], 0, False)


class Rig:
    """An arena, and a paged cache with an engine that copies between the two."""

    def __init__(self, library, directory) -> None:
        self.layout = Layout.of(
            settings_of(block_tokens=TOKENS),
            dtype="float32",
            layers=LAYERS,
            engine_block_tokens=TOKENS,
            rope="",
        )
        [self.part] = self.layout.owned_parts
        self.size = HEADER_BYTES + self.layout.payload_bytes(self.part, TOKENS)
        self.swap = NativeSwap(library, self.layout, caches_of(self.layout, 8))
        self.store = ArenaStore(library, "test", directory=directory, size=8 << 20)

    def batch(self, keys, blocks, **changes) -> ValueBatch:
        copies = [UnplacedCopy(self.part, [block], TOKENS, 0) for block in blocks]
        packed = self.swap.pack_unplaced(copies)
        return ValueBatch(
            **{
                "names": text_of(keys),
                "sizes": array("q", [self.size] * len(blocks)).tobytes(),
                "starts": b"".join(bytes([block]) * 56 for block in blocks),
                "engine": self.swap.engine,
                "items": packed.items,
                "ids": packed.ids,
                **changes,
            }
        )

    def payload_of(self, block) -> bytes:
        payload = memoryview(bytearray(self.size - HEADER_BYTES))
        self.swap.gather([BlockCopy(self.part, [block], TOKENS, 0, payload)])
        return bytes(payload)

    def close(self) -> None:
        self.swap.close()
        self.store.close()


@pytest.fixture
def rig(library, tmp_path):
    rig = Rig(library, tmp_path)
    yield rig
    rig.close()


def stored(rig, blocks):
    keys = fresh_keys(len(blocks))
    assert rig.store.fill(KINDS, [rig.batch(keys, blocks)]).num_bytes == rig.size * len(keys)
    return keys


def test_values_are_the_start_a_sum_and_what_the_cache_holds(rig):
    keys = stored(rig, [3, 5])
    loan = rig.store.borrow(keys, [rig.size] * 2)
    for i, block in enumerate((3, 5)):
        value = loan.places.value(i)
        assert bytes(value[:56]) == bytes([block]) * 56
        assert bytes(value[HEADER_BYTES:]) == rig.payload_of(block)


def test_what_is_filled_can_be_taken_to_other_blocks(rig):
    keys = stored(rig, [3, 5])
    taken = rig.store.take(rig.batch(keys, [6, 7], starts=bytes([3]) * 56 + bytes([5]) * 56))
    assert taken.copies.wait(10)
    assert taken.copies.num_right == 2
    assert rig.store.still_there(taken.loan) == 2
    assert [rig.payload_of(n) for n in (6, 7)] == [rig.payload_of(n) for n in (3, 5)]


def test_the_caller_rests_when_all_is_stored(rig):
    keys = fresh_keys(2)
    began = time.monotonic()
    filled = rig.store.fill(KINDS, [rig.batch(keys, [3, 5])], 0.05)
    assert time.monotonic() - began >= 0.05
    assert filled == ([0, 1], 2 * rig.size, True)
    assert rig.store.match(keys) == 2
    assert rig.store.counts().reserved == 0


def test_batches_are_stored_in_one_call_and_their_values_are_numbered_through(rig):
    keys = stored(rig, [3, 5])
    others = fresh_keys(3)
    batches = [
        rig.batch([others[0], keys[0]], [1, 3]),
        rig.batch([keys[1]], [5]),
        rig.batch(others[1:], [2, 4]),
    ]
    filled = rig.store.fill([Kind.BLOCK] * 5, batches)
    assert filled == ([0, 3, 4], 3 * rig.size, True), "the others were stored before"
    loan = rig.store.borrow(others, [rig.size] * 3)
    for i, block in enumerate((1, 2, 4)):
        assert bytes(loan.places.value(i)[HEADER_BYTES:]) == rig.payload_of(block)


def test_a_batch_without_room_stores_nothing_and_holds_nothing(rig):
    most = (8 << 20) // rig.size + 1
    keys = fresh_keys(2 + most)
    batches = [rig.batch(keys[:2], [3, 5]), rig.batch(keys[2:], [1] * most)]
    assert rig.store.fill([Kind.BLOCK] * len(keys), batches) == NOTHING
    assert rig.store.match(keys) == 0
    assert rig.store.counts().reserved == 0


def test_a_batch_that_cannot_be_copied_holds_nothing_either(rig):
    keys = fresh_keys(4)
    batches = [rig.batch(keys[:2], [3, 5]), rig.batch(keys[2:], [3, 99])]
    with pytest.raises(LayoutError, match="outside the cache"):
        rig.store.fill(KINDS * 2, batches)
    assert rig.store.counts().reserved == 0


def test_a_value_of_another_header_stops_all_copies(rig):
    keys, before = stored(rig, [3, 5]), rig.payload_of(6)
    assert rig.store.take(rig.batch(keys, [6, 7], starts=bytes([3]) * 112)) is None
    assert rig.payload_of(6) == before


def test_a_damaged_value_is_not_among_those_that_are_right(rig):
    keys = stored(rig, [3, 5])
    rig.store.borrow(keys, [rig.size] * 2).places.value(1)[200] ^= 1
    starts = bytes([3]) * 56 + bytes([5]) * 56
    taken = rig.store.take(rig.batch(keys, [6, 7], starts=starts))
    assert taken.copies.wait(10)
    assert taken.copies.num_right == 1


@pytest.mark.parametrize("wrong", [-8, 8])
def test_a_size_that_is_not_that_of_its_copy_reserves_and_moves_nothing(rig, wrong):
    sizes = array("q", [rig.size, rig.size + wrong]).tobytes()
    assert rig.store.fill(KINDS, [rig.batch(fresh_keys(2), [3, 5], sizes=sizes)]) == NOTHING
    assert rig.store.counts().reserved == 0


def test_fewer_ids_than_the_copies_name_move_nothing(rig):
    batch = rig.batch(fresh_keys(2), [3, 5])
    assert rig.store.fill(KINDS, [batch._replace(ids=batch.ids[:8])]) == NOTHING
    assert rig.store.counts().reserved == 0


def test_a_block_that_is_not_in_the_cache_is_an_error_and_leaves_nothing_reserved(rig):
    with pytest.raises(LayoutError, match="outside the cache"):
        rig.store.fill(KINDS, [rig.batch(fresh_keys(2), [3, 99])])
    assert rig.store.counts().reserved == 0
