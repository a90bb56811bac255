"""The pool with a seal: D loads with P's key; with another key it computes, and says why."""

from __future__ import annotations

import pytest

from pdstore.errors import LayoutError, Reason
from pdstore.format import block
from pdstore.format.envelope import ENVELOPE_BYTES
from pdstore.store import open_store
from pdstore.testing.values import empty_slots
from pdstore.worker.swap.native import NativeSwap
from tests.support.arena_kit import place_of
from tests.support.kv import BLOCK_BYTES, POISON, eventually, settings_of
from tests.support.pool_kit import D_BLOCKS, assert_loaded, load, save
from tests.support.seal_key import write_seal_key

A, B = "ab" * 32, "0c" * 32
NUM_TOKENS = 200
TOKENS = list(range(NUM_TOKENS))


@pytest.fixture
def key_file(tmp_path):
    return lambda *keys: write_seal_key(tmp_path / "-".join(k[:2] for k in keys), *keys)


@pytest.fixture(params=["memory", "shm"])
def store(request, tmp_path, closed_after):
    """The arena's values are copied in place, but not when they are encrypted."""
    if request.param == "shm":
        request.getfixturevalue("library")
    url = {"memory": "memory://", "shm": f"shm://test?size=32MiB&dir={tmp_path}"}[request.param]
    return closed_after(open_store(url, settings_of()))


@pytest.fixture
def p(instance, key_file):
    return instance(seal_key_file=key_file(A))


@pytest.mark.parametrize("keys", [(A,), (B, A)])  # (B, A): during a rotation
def test_d_with_ps_key_loads_what_p_saved(p, instance, key_file, keys):
    assert save(p, TOKENS).num_tokens == NUM_TOKENS
    d = instance(POISON, seal_key_file=key_file(*keys))
    assert load(d, TOKENS).num_tokens == NUM_TOKENS
    assert_loaded(p, d, NUM_TOKENS)


def test_d_with_another_key_computes_says_why_and_spoils_nothing(p, instance, key_file, caplog):
    save(p, TOKENS)
    stranger = instance(POISON, seal_key_file=key_file(B), role="decode")
    result = load(stranger, TOKENS)
    assert (result.num_tokens, result.reason) == (0, Reason.OTHER_SEAL)
    assert_loaded(p, stranger, 0)
    eventually(lambda: "a load fell short (other_seal)" in caplog.text)
    d = instance(POISON, seal_key_file=key_file(A), role="decode")
    assert load(d, TOKENS).num_tokens == NUM_TOKENS


def test_an_instance_without_a_seal_is_told_that_p_has_one(p, instance, caplog):
    d = instance(POISON)
    keys = p.cache.keys(TOKENS)
    _, params = p.cache.announce(keys)
    found = d.cache.lookup(d.cache.keys(TOKENS), params).wait(10)
    assert found.reason is Reason.NAMESPACE
    assert 'seal: "aes-256-gcm" there, missing here' in caplog.text
    with pytest.raises(LayoutError):
        d.pool.load(keys, D_BLOCKS)


@pytest.mark.parametrize("store", ["shm"], indirect=True)
def test_a_byte_of_the_arena_that_changes_after_the_check_is_not_loaded(
    p, instance, key_file, store, monkeypatch
):
    """SECURITY.md says that a seal helps against it: what is checked is a copy of D's own."""
    save(p, TOKENS)
    d = instance(POISON, seal_key_file=key_file(A))
    [key] = d.cache.keys(TOKENS[:64]).store_keys(d.layout.parts)
    size = block.HEADER_BYTES + BLOCK_BYTES + ENVELOPE_BYTES
    value, submit = place_of(store, key, size), NativeSwap.submit

    def change_and_submit(swap, *args, **kwargs):
        value[-30] ^= 0x40
        return submit(swap, *args, **kwargs)

    monkeypatch.setattr(NativeSwap, "submit", change_and_submit)
    assert load(d, TOKENS).num_tokens == NUM_TOKENS
    assert_loaded(p, d, NUM_TOKENS)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_value_that_the_pool_moved_is_forged(p, instance, key_file, store):
    """Two blocks have changed places."""
    save(p, TOKENS)
    d = instance(POISON, seal_key_file=key_file(A))
    names = d.cache.keys(TOKENS).store_keys(d.layout.parts)[:2]
    slots = empty_slots([block.HEADER_BYTES + BLOCK_BYTES + ENVELOPE_BYTES] * 2)
    assert store.get(names, slots) == 2
    store.remove(names)
    assert store.put(names[::-1], slots) == 2
    result = load(d, TOKENS)
    assert (result.num_tokens, result.reason) == (0, Reason.FORGED)
