"""Stores that encrypt, and the files with their keys."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import pytest

from pdstore.errors import (
    ConfigError,
    Forged,
    MissingExtra,
    OtherSeal,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.envelope import ENVELOPE_BYTES, Envelopes
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.store.connect import connect_store, read_pool_id
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys, TellsRemovals
from pdstore.store.seal import Encrypted, read_seal_keys, seal_store
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import assert_values, empty_slots, get, put
from tests.support.seal_key import write_seal_key


@pytest.fixture
def settings(tmp_path):
    return read_settings(store="memory://", seal_key_file=write_seal_key(tmp_path / "key"))


def test_without_the_setting_nothing_changes():
    store = MemoryStore()
    assert seal_store(store, read_settings()) is store


def test_two_instances_with_one_key_file_read_each_other(settings):
    inner, keys = MemoryStore(), fresh_keys(1)
    assert put(seal_store(inner, settings), keys, [b"x" * 99]) == 1
    assert get(seal_store(inner, settings), keys, [99]) == [b"x" * 99]
    assert inner.match(keys) == 1


def test_a_bad_key_file_refuses_to_start(tmp_path):
    settings = read_settings(store="memory://", seal_key_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="PDSTORE_SEAL_KEY_FILE: cannot read"):
        connect_store(settings, Metrics())


def test_without_the_package_its_extra_is_named(settings, monkeypatch):
    monkeypatch.delitem(sys.modules, "pdstore.format.envelope")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdstore\[seal\]'"):
        seal_store(MemoryStore(), settings)


A, B = "ab" * 32, "0C" * 32


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "seal.key"

    def write(text, mode=0o600):
        path.write_bytes(text.encode("latin-1"))
        path.chmod(mode)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 keys: write one"),
        (f"{A}\n{B}\n{A[:-2]}00", "3 keys: write one"),
        (A[1:], "not 64 hex digits; make one with"),
        (A[1:] + "x", "not 64 hex digits"),
        (f"{A}\n{A.upper()}", "are the same one"),
        (A + "\xe9", "is no key file"),
        (f"#{'x' * 5000}\n{A}", "is not a file of at most 4096 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_quoting_it(key_file, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_seal_keys(key_file(text))
    assert "PDSTORE_SEAL_KEY_FILE" in str(caught.value)
    assert A[2:-2] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_open_is_refused(key_file, mode):
    with pytest.raises(ConfigError, match=f"mode {mode:o}.: chmod 600"):
        read_seal_keys(key_file(A, mode))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "."):
        with pytest.raises(ConfigError, match="is not a file"):
            read_seal_keys(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot read .* make a key with .umask 077"):
        read_seal_keys(tmp_path / "missing")


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


def test_a_value_that_is_not_encrypted_is_refused(inner, store, keys, values):
    plant(inner, keys[0], bytes(SIZE + ENVELOPE_BYTES))
    assert refused(store, keys, Forged) == 0
    plant(inner, keys[0], values[0])
    assert refused(store, keys, WrongLength) == 0


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


@pytest.mark.parametrize("protocol", [FindsKeys, TellsRemovals])
def test_protocols_without_values_pass_and_those_with_values_do_not(tmp_path, protocol):
    with contextlib.closing(FileStore(tmp_path / "pool")) as files:
        store = encrypted(files)
        assert store.optional(protocol) is files
        assert store.optional(FileStore) is None
