"""A value that cannot be read while others can: it is missed, moved away and stored again."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest

from pdstore.errors import StoreDenied, StoreError, StoreUnavailable
from pdstore.format.keys import POOL_ID_KEY
from pdstore.store.connect import read_pool_id
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put
from tests.support.file_pool import SIZE, fill, path_of, stored
from tests.support.fuse_mount import mounted
from tests.support.kv import Instance

NUMBERS = (errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EUCLEAN)


@pytest.fixture
def bad_at(monkeypatch):
    """Lets calls of the system fail for some paths: `bad_at("open", errno.EIO, path, ...)`."""

    def bad_at(call, number, *paths):
        real, named = getattr(os, call), set(map(str, paths))

        def failing(path, *args, **kwargs):
            if str(path) in named:
                raise OSError(number, os.strerror(number), path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, call, failing)

    return bad_at


def read(store, keys, verb):
    return store.match(keys) if verb == "match" else len(get(store, keys, [SIZE] * len(keys)))


CALLS = {"match": "utime", "get": "open"}


@pytest.mark.misconfiguration(
    "one stored file cannot be read, as another user's, or on a bad sector"
)
@pytest.mark.parametrize("verb", ["match", "get"])
@pytest.mark.parametrize("number", NUMBERS)
def test_one_value_that_fails_is_missed_and_stored_again(store, bad_at, monkeypatch, verb, number):
    keys = fill(store, 4)
    bad_at(CALLS[verb], number, path_of(store, keys[2]))
    assert read(store, keys, verb) == 2
    monkeypatch.undo()
    assert stored(store, keys) == [keys[0], keys[1], keys[3]]
    put(store, [keys[2]], [content(keys[2], SIZE)])
    assert store.match(keys) == 4
    assert get(store, keys, [SIZE] * 4) == [content(key, SIZE) for key in keys]


@pytest.mark.parametrize("verb", ["match", "get"])
def test_a_value_that_is_asked_for_alone_is_compared_with_the_pools_id(store, bad_at, verb):
    [key] = fill(store, 1)
    bad_at(CALLS[verb], errno.EIO, path_of(store, key))
    with pytest.raises(StoreUnavailable):
        read(store, [key], verb)
    assert stored(store, [key]) == [key], "nobody knows whether others can be read"
    read_pool_id(store)
    assert read(store, [key], verb) == 0
    assert stored(store, [key]) == []


@pytest.mark.parametrize("verb", ["match", "get"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_store_whose_values_all_fail_is_down_and_loses_none(store, bad_at, verb, number):
    read_pool_id(store)
    keys = fill(store, 4)
    bad_at(CALLS[verb], number, *(path_of(store, key) for key in [*keys, POOL_ID_KEY]))
    with pytest.raises(StoreError) as caught:
        read(store, keys, verb)
    assert type(caught.value) in (StoreUnavailable, StoreDenied)
    assert stored(store, keys) == keys


def test_one_that_can_be_neither_read_nor_moved_is_missed_and_told(store, bad_at, caplog):
    keys = fill(store, 3)
    path = path_of(store, keys[1])
    for call in ("open", "rename", "unlink"):
        bad_at(call, errno.EIO, path)
    assert read(store, keys, "get") == 1
    assert f"{path} cannot be read (Input/output error), and others can: delete it" in caplog.text


def test_a_file_that_cannot_be_looked_at_hinders_no_eviction(store, bad_at):
    keys = fill(store, 18, age_s=300)
    bad_at("lstat", errno.EIO, path_of(store, keys[0]))
    assert len(fill(store, 10)) == 10
    bad_at("open", errno.EIO, path_of(store, keys[1]).parent)
    assert len(fill(store, 10)) == 10


@pytest.mark.misconfiguration(
    "one stored file cannot be read, as another user's, or on a bad sector"
)
@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("read", "EIO"),
        pytest.param("open", "EACCES", marks=pytest.mark.nightly),
        pytest.param("open", "ESTALE", marks=pytest.mark.nightly),
        ("utimens", "EPERM"),
    ],
)
def test_a_hand_off_over_a_bad_sector_is_short_once(tmp_path, call, why):
    """The kernel's errors, and whole instances: `utimens` of a file that is another user's."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(mounted(tmp_path))
        store = FileStore(disk.at / "pool", budget=1 << 30)
        stack.callback(store.close)
        read_pool_id(store)
        p, d = (Instance(store, role=role) for role in ("prefill", "decode"))
        stack.callback(d.close)
        stack.callback(p.close)
        tokens, blocks = range(600), range(38)

        def handed_over():
            job = p.pool.save(p.cache.keys(tokens), blocks).wait(30.0)
            found = d.cache.lookup(d.cache.keys(tokens)).wait(30.0)
            return job.num_tokens, d.pool.load(found.keys, blocks).wait(30.0).num_tokens

        assert handed_over() == (600, 600)
        third = p.cache.keys(tokens).hash_of(2).hex()
        [old] = (disk.behind / "pool").glob(f"*/*{third}")
        before = old.stat()
        disk.hurt(call, third, why)
        assert min(handed_over()) >= 128, "what is before it counts"
        disk.heal()
        assert handed_over() == (600, 600)
        assert not os.path.samestat(before, old.stat()), "it was stored again"


def test_nothing_is_stored_under_a_value_that_was_moved_away(store, bad_at, monkeypatch):
    [key, other] = fill(store, 2)
    bad_at("utime", errno.EPERM, path_of(store, key))
    assert store.match([key, other]) == 0
    monkeypatch.undo()
    assert store.match([key]) == 0
    assert store.match([other]) == 1
    assert store.match(fresh_keys(1)) == 0
