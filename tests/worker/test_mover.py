"""Mover: what is not right is a miss, and never in the paged cache."""

from __future__ import annotations

import pytest

from pdstore import LayerSpec
from pdstore.errors import Reason, StoreDenied
from pdstore.format.block import HEADER_BYTES
from pdstore.store.base import Slots
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import get
from pdstore.worker.values import BlockRange, PromptBlocks
from tests.support.kv import POISON
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save


def raw(p, keys) -> dict:
    """The stored bytes of a prompt's values, by key."""
    values = PromptBlocks(p.layout, keys, [P_BLOCKS]).values(BlockRange(0, len(keys)))
    return dict(zip(values.keys, get(p.store, values.keys, values.sizes), strict=True))


def plant(store, key, data: bytes) -> None:
    store.remove([key])
    store.put([key], Slots(memoryview(bytearray(data)), len(data), [0], [len(data)]))


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.requirement("C16", "length and checksum of a value are checked before use")
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: flip(data, HEADER_BYTES), Reason.CORRUPT),
        (lambda data: flip(data, 5), Reason.CORRUPT),
        (lambda data: flip(data, len(data) - 1), Reason.CORRUPT),
        (lambda data: data[:-1], Reason.CORRUPT),
        (lambda data: data + b"\0", Reason.CORRUPT),
        (lambda data: data[:10], Reason.CORRUPT),
    ],
    ids=["first", "header", "last", "short", "long", "stub"],
)
def test_a_damaged_value_is_a_miss_is_removed_and_heals(p, d, store, block, damage, reason):
    save(p, range(200))
    keys = p.cache.keys(range(200))
    key = keys.store_keys(p.layout.parts)[block]
    plant(store, key, damage(raw(p, keys)[key]))
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (64 * block, reason)
    assert_loaded(p, d, 64 * block)
    assert store.match([key]) == 0
    save(p, range(200))
    assert load(d, range(200)).num_tokens == 200
    assert_loaded(p, d, 200)


def test_swapped_values_are_misses(instance, store):
    layers = (LayerSpec(2, 8), LayerSpec(2, 8, window=64))
    p, d = (instance(fill=f, kv_shards=2, layers=layers) for f in (None, POISON))
    save(p, range(128))
    values = raw(p, p.cache.keys(range(128)))
    keys = list(values)
    for a, b in ((0, 4), (0, 1), (0, 2)):  # two blocks, two shards, two groups
        plant(store, keys[a], values[keys[b]])
        assert load(d, range(128)).reason is Reason.FOREIGN
        assert (d.tokens(D_BLOCKS) == POISON).all()
        plant(store, keys[a], values[keys[a]])


@pytest.mark.requirement(
    "R-X-2, R23", "a block counts only after its copy, and the slots lent for it are given back"
)
def test_a_block_is_loaded_whole_or_not_at_all(instance, store):
    p, d = (instance(fill=f, kv_shards=2) for f in (None, POISON))
    save(p, range(200))
    keys = p.cache.keys(range(200)).store_keys(p.layout.parts)
    store.remove([keys[5]])  # the second shard of block 2
    assert d.cache.match(d.cache.keys(range(200))).num_tokens == 128
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (128, Reason.LOST)
    assert_loaded(p, d, 128)


def test_a_value_that_cannot_be_removed_is_still_only_a_miss(store, instance):
    class ReadOnlyUser(WrapperStore):
        def remove(self, keys):
            raise StoreDenied("no right to remove")

    p, d = instance(), instance(fill=POISON, over=ReadOnlyUser(store))
    save(p, range(200))
    values = raw(p, p.cache.keys(range(200)))
    key = list(values)[1]
    plant(store, key, flip(values[key], 100))
    result = load(d, range(200))
    assert (result.num_tokens, result.reason) == (64, Reason.CORRUPT)
    assert_loaded(p, d, 64)


IMPOSSIBLE = {
    "negative": lambda keys: -1,
    "too large": lambda keys: len(keys) + 5,
    "none": lambda keys: None,
    "float": lambda keys: 1.0,
    "bool": lambda keys: True,
}


class Lies(WrapperStore):
    """Fills slots with garbage and claims a count that cannot be."""

    def __init__(self, store, answer, raises=None):
        super().__init__(store)
        self._answer, self._raises = answer, raises

    def get(self, keys, slots):
        for i in range(len(keys)):
            slots.value(i)[:] = b"A" * len(slots.value(i))
        count = self._answer(keys)
        if self._raises is not None:
            raise self._raises("on purpose", num_done=count)
        return count


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("answer", IMPOSSIBLE)
def test_a_count_that_cannot_be_is_an_error_of_the_store_and_scatters_nothing(
    instance, store, answer, native
):
    d = instance(fill=POISON, over=Lies(store, IMPOSSIBLE[answer]), native=native)
    result = d.pool.load(d.cache.keys(range(200)), D_BLOCKS).wait(10)
    assert (result.num_tokens, result.reason) == (0, Reason.STORE_ERROR)
    assert all((cache == POISON).all() for cache in d.caches)


@pytest.mark.parametrize("verb", ["put", "match"])
@pytest.mark.parametrize("answer", IMPOSSIBLE)
def test_a_save_believes_no_count_that_cannot_be(instance, store, answer, verb):
    lies = WrapperStore(store)
    setattr(lies, verb, lambda keys, *slots: IMPOSSIBLE[answer](keys))
    p = instance(over=lies)
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    assert job.wait(10).reason is Reason.STORE_ERROR
    assert not job.durable
