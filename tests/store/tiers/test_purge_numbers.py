"""A namespace's purge numbers in one store: found, owned, and taken by two purges at once."""

from __future__ import annotations

import threading

import pytest

from pdstore.format.keys import HASH_BYTES
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.tiers.purges import (
    Purge,
    PurgeNumbers,
    PurgeWatch,
    Sample,
    namespaces_of,
    purge_key,
)
from pdstore.testing import fresh_keys
from pdstore.testing.values import contents, put
from tests.store.tiers.conftest import Counted

SIZE = 4096
TOKEN = bytes(HASH_BYTES)


def namespace_of(keys):
    [namespace] = namespaces_of(keys)
    return namespace


@pytest.fixture(params=["memory", "file", pytest.param("redis", marks=pytest.mark.redis)])
def store(request, closed_after, tmp_path):
    if request.param == "redis":
        return closed_after(open_store(request.getfixturevalue("redis_url"), Settings()))
    is_file = request.param == "file"
    return closed_after(FileStore(tmp_path / "numbers") if is_file else MemoryStore())


def test_a_number_is_found_by_whoever_begins_at_nothing_and_costs_one_search_later(store):
    namespace = namespace_of(fresh_keys(1))
    counted = Counted(store)
    ours, theirs = PurgeNumbers(store), PurgeNumbers(counted)
    for last in (0, 1, 2, 3, 40, 41, 200):
        assert last == 0 or ours.put(namespace, last, TOKEN)
        assert PurgeNumbers(store).last(namespace) == theirs.last(namespace) == last
        counted.num_matches = 0
        assert theirs.last(namespace) == last
        assert counted.num_matches == 1
    store.remove([purge_key(namespace, n) for n in range(3, 201)])
    assert theirs.last(namespace) == 2, "it was lost"
    store.remove([purge_key(namespace, n) for n in (1, 2)])
    assert theirs.last(namespace) == 0


def test_a_number_belongs_to_whoever_has_stored_it(store):
    namespace = namespace_of(fresh_keys(1))
    assert PurgeNumbers(store).put(namespace, 3, b"a" * HASH_BYTES)
    assert not PurgeNumbers(store).put(namespace, 3, b"b" * HASH_BYTES)
    assert PurgeNumbers(store).put(namespace, 4, b"b" * HASH_BYTES)
    store.remove([purge_key(namespace, n) for n in range(1, 5)])


def test_a_full_store_takes_a_number():
    store = MemoryStore(budget=2 * SIZE, lease_s=600)
    keys = fresh_keys(2)
    put(store, keys, contents(keys, SIZE))
    assert store.match(keys) == 2
    assert PurgeNumbers(store).put(namespace_of(keys), 1, TOKEN)


def test_purges_at_once_take_numbers_of_their_own(name, closed_after, tmp_path):
    namespaces = [namespace_of(fresh_keys(1)) for _ in range(40)]
    start = threading.Barrier(2)
    taken: list[list[int]] = [[], []]

    def purge(mine):
        first = PurgeNumbers(closed_after(MemoryStore(f"memory://{name}")))
        lower = PurgeNumbers(closed_after(FileStore(tmp_path / "files")))
        for namespace in namespaces:
            start.wait(10)
            one = Purge(namespace, first, [lower])
            assert one.begin() == []
            taken[mine].append(one.number)
            one.end([lower])

    keep = closed_after(MemoryStore(f"memory://{name}"))
    files = closed_after(FileStore(tmp_path / "files"))
    threads = [threading.Thread(target=purge, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for namespace, *numbers in zip(namespaces, *taken, strict=True):
        assert numbers[0] != numbers[1]
        assert [number % 2 for number in numbers] == [1, 1]
        last = max(numbers) + 1
        assert PurgeWatch(keep, files).sample(namespace) == Sample(last, last)
