"""Encrypted: a store like any other for key holders, and unreadable and unforgeable for others."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import Forged, OtherSeal, StoreUnavailable, WrongLength
from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.store.connect import read_pool_id
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import (
    FindsKeys,
    TellsChanges,
    find_optional,
)
from pdstore.store.seal import Encrypted
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import assert_values, empty_slots, get, put

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
BATCH_BYTES = 256 << 10
SIZE = 100


def encrypted(store, *keys):
    return Encrypted(store, Envelopes(keys or (KEY,)), BATCH_BYTES)


class TestEncryptedStore(StoreTests):
    @pytest.fixture
    def inner(self):
        return MemoryStore(lease_s=7.0)

    @pytest.fixture
    def store(self, inner):
        with contextlib.closing(encrypted(inner)) as store:
            yield store

    @pytest.fixture
    def peer(self, inner):
        return encrypted(inner)

    @pytest.fixture
    def small_store(self):
        store = encrypted(MemoryStore(budget=24 * (65 << 10), lease_s=2.0))
        with contextlib.closing(store):
            yield store

    def write_raw(self, store, key, data):
        envelope = bytearray(len(data) + ENVELOPE_BYTES)
        Envelopes([KEY]).encrypt(key, memoryview(data), memoryview(envelope))
        plant(store.wrapped, key, bytes(envelope))


@pytest.fixture
def inner():
    return MemoryStore()


@pytest.fixture
def keys():
    return fresh_keys(4)


@pytest.fixture
def values(keys):
    return [content(key, SIZE) for key in keys]


@pytest.fixture
def store(inner, keys, values):
    """With its values stored."""
    store = encrypted(inner)
    put(store, keys, values)
    return store


def stored_bytes(inner, key):
    return get(inner, [key], [SIZE + ENVELOPE_BYTES])[0]


def plant(inner, key, data):
    inner.remove([key])
    assert put(inner, [key], [data]) == 1


def test_the_pool_sees_no_value(inner, store, keys, values):
    for key, value in zip(keys, values, strict=True):
        assert value[:16] not in stored_bytes(inner, key)


def refused(store, keys, kind):
    """The number of values before the one at which a get raises."""
    with pytest.raises(kind) as caught:
        get(store, keys, [SIZE] * len(keys))
    assert caught.value.num_done < len(keys)
    assert str(keys[caught.value.num_done]) in str(caught.value)
    return caught.value.num_done


def test_a_flipped_byte_is_refused_after_the_values_before_it(inner, store, keys, values):
    damaged = bytearray(stored_bytes(inner, keys[2]))
    damaged[60] ^= 1
    plant(inner, keys[2], bytes(damaged))
    slots = empty_slots([SIZE] * 4)
    with pytest.raises(Forged) as caught:
        store.get(keys, slots)
    assert caught.value.num_done == 2
    assert_values([bytes(slots.value(i)) for i in range(2)], values[:2])


def test_a_value_of_another_block_is_refused(inner, store, keys):
    plant(inner, keys[1], stored_bytes(inner, keys[0]))
    assert refused(store, keys, Forged) == 1


def test_a_value_that_is_not_encrypted_is_refused(inner, store, keys, values):
    plant(inner, keys[0], bytes(SIZE + ENVELOPE_BYTES))
    assert refused(store, keys, Forged) == 0
    plant(inner, keys[0], values[0])
    assert refused(store, keys, WrongLength) == 0


def test_during_a_rotation_both_keys_are_read(inner, store, keys, values):
    rotating = encrypted(inner, OTHER, KEY)
    assert get(rotating, keys, [SIZE] * 4) == values
    inner.remove(keys)
    put(rotating, keys, values)
    assert get(encrypted(inner, OTHER), keys, [SIZE] * 4) == values
    assert refused(store, keys, OtherSeal) == 0


def test_markers_are_encrypted_too(inner):
    key = BlockKey(f"pds1:{'ab' * 16}:handoff:{'cd' * 16}:0:done")
    put(encrypted(inner), [key], [b"x" * 64])
    with pytest.raises(OtherSeal):
        get(encrypted(inner, OTHER), [key], [64])
    assert get(encrypted(inner), [key], [64]) == [b"x" * 64]


def test_the_pools_id_is_read_by_all(inner):
    """Else instances with different keys would replace it in turn."""
    ids = {read_pool_id(one) for one in (encrypted(inner), encrypted(inner, OTHER), inner)}
    assert len(ids) == 1
    assert inner.match([POOL_ID_KEY]) == 1


@pytest.mark.parametrize("num_done", [1, 99, -1])
def test_what_came_before_an_error_of_the_store_is_decrypted(num_done, keys, values):
    class Failing(MemoryStore):
        def get(self, keys, slots):
            super().get(keys, slots)
            raise StoreUnavailable("away", num_done=num_done)

    store = encrypted(Failing())
    put(store, keys, values)
    slots = empty_slots([SIZE] * 4)
    with pytest.raises(StoreUnavailable) as caught:
        store.get(keys, slots)
    good = num_done if 0 < num_done <= 4 else 0
    assert caught.value.num_done == good
    assert_values([bytes(slots.value(i)) for i in range(good)], values[:good])


def test_protocols_without_values_pass_and_those_with_values_do_not(tmp_path):
    with contextlib.closing(FileStore(tmp_path / "pool")) as files:
        store = encrypted(files)
        for protocol in (FindsKeys, TellsChanges):
            assert find_optional(store, protocol) is files
        assert find_optional(store, FileStore) is None
