"""The pool of a command: looked at and not made; its keys, read back and counted."""

from __future__ import annotations

import pytest

from pdstore.cli import pool_view as module
from pdstore.cli.pool_view import StoredKey, open_pool
from pdstore.errors import ConfigError
from pdstore.format.keys import BlockKey, Kind, PromptKeys
from pdstore.format.namespace import Part
from pdstore.outcome import Reason
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import put
from tests.support.command import namespace_of

KEY = BlockKey("pds1:" + "a" * 32 + ":0:0:" + "b" * 32)


def test_what_is_no_value_of_ours_is_damaged(file_url):
    with open_pool(file_url) as pool:
        assert pool.read(KEY) is None
        put(pool.store, [KEY], [b"short"])
        assert pool.read(KEY) == (5, None, Reason.CORRUPT)


@pytest.mark.parametrize("name", ["file://{}/pool", "shm://pool?dir={}"])
def test_looking_makes_no_pool(name, tmp_path):
    url = name.format(tmp_path)
    with pytest.raises(ConfigError, match="there is no pool in"), open_pool(url):
        pass
    assert not [*tmp_path.iterdir()]
    open_store(f"{url}{'&size=8MiB' if url.startswith('shm') else ''}", read_settings()).close()
    with open_pool(url) as pool:
        assert pool.read(KEY) is None


def test_a_store_that_cannot_list_is_refused(monkeypatch):
    monkeypatch.setattr(module, "open_store", lambda url, settings: WrapperStore(MemoryStore()))
    with pytest.raises(ConfigError, match="cannot list"), open_pool("memory://"):
        pass


NAMESPACE = namespace_of("any", parts=(Part(2, 3),))


def test_blocks_and_tails_are_read_back():
    keys = PromptKeys(NAMESPACE).extend(range(20))
    block, tail = map(StoredKey.parsed, keys.store_keys(NAMESPACE.parts))
    hashes = [keys.hash_of(number).hex() for number in (0, 1)]
    assert block == (Kind.BLOCK, NAMESPACE.hex, 2, 3, hashes[0], None, None)
    assert tail == (Kind.TAIL, NAMESPACE.hex, 2, 3, hashes[1], 4, None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "pds1:", "pds1:doctor:00", f"pds1:{'a' * 32}:0:0:short"),
        *(f"pds1:{'a' * 32}:{number}:0:{'b' * 32}" for number in ("9" * 5000, "\u0661", "-1")),
        f"pds1:{'a' * 32}:0:0:{'b' * 32}:partial:{'9' * 5000}",
        f"pds1:{'a' * 32}:handoff:{'b' * 32}:0:d\u00f6ne",
    ],
)
def test_other_texts_are_no_keys(text):
    assert StoredKey.parsed(text) is None
