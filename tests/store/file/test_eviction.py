"""The evictor keeps the budget: which values go, which stay, and who may evict."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time

import pytest

from pdstore.errors import StoreFull
from pdstore.format.keys import BlockKey
from pdstore.store.file.directory import PoolDirectory, try_lock
from pdstore.store.file.eviction import Evictor
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import put
from tests.support.file_pool import SIZE, age, fill, path_of, root_of, stored
from tests.support.kv import eventually


@pytest.fixture(params=["python", "native"])
def built(request, library):
    return {"python": lambda: None, "native": lambda: library}[request.param]


def test_the_least_recently_used_values_go_first(store):
    old, middle = fill(store, 4, age_s=300), fill(store, 4, age_s=200)
    young = fill(store, 4, age_s=100)
    fill(store, 10)
    assert 0 <= len(stored(store, old)) < 4
    assert stored(store, middle) == middle
    fill(store, 3)
    assert stored(store, old) == []
    assert stored(store, young) == young


def test_a_match_counts_as_use_and_leases(store):
    keys = fill(store, 16, age_s=300)
    assert store.match(keys[:4]) == 4
    fill(store, 10, age_s=100)
    assert stored(store, keys)[:4] == keys[:4]
    assert len(stored(store, keys)) < 16
    assert time.time() < path_of(store, keys[0]).stat().st_mtime <= time.time() + store.lease_s


def test_what_was_looked_up_goes_before_what_was_put_later(store):
    looked_up, put_later = fill(store, 10), fill(store, 8, age_s=5)
    for key in looked_up:  # its lease ended after the put
        os.utime(path_of(store, key), (time.time() - 12, time.time() - 12 + store.lease_s))
    fill(store, 6)
    assert stored(store, put_later) == put_later
    assert 11 < store.oldest_age_s([SIZE]) < 60


def num_values(store):
    return sum(1 for _ in store.stored_values())


def test_processes_that_fill_a_pool_together_keep_its_budget(store):
    with contextlib.closing(FileStore(root_of(store), budget=20 * SIZE)) as other:
        for _ in range(20):
            fill(store, 1, age_s=100)
            fill(other, 2, age_s=100)
            assert num_values(store) <= 21


def test_values_that_several_processes_put_at_once_empty_no_pool(store):
    """Each counts them, so each would make room for them."""
    with contextlib.ExitStack() as closing:
        others = [FileStore(root_of(store), budget=20 * SIZE) for _ in range(4)]
        for other in others:
            closing.callback(other.close)
        for _ in range(30):
            keys = fill(store, 1, age_s=100)
            for other in others:
                os.unlink(path_of(store, keys[0]))
                put(other, keys, [content(keys[0], SIZE)])
                age(store, keys[0], 100)
        assert num_values(store) >= 14


def test_after_a_clear_nothing_goes_from_a_pool_with_room(store):
    with contextlib.closing(FileStore(root_of(store), budget=20 * SIZE)) as other:
        cleared, kept = fill(store, 10, age_s=300), fill(store, 9, age_s=200)
        fill(store, 3, age_s=100)
        for key in cleared:
            other.remove([key])
        fill(store, 3)
        assert stored(store, kept) == kept


def test_others_may_put_after_room_was_made_for_a_hand_off(tmp_path):
    clock = itertools.count().__next__  # so a scan takes time
    with contextlib.closing(FileStore(tmp_path, budget=20 * SIZE, clock=clock)) as store:
        fill(store, 18, age_s=300)
        assert store.make_room(fresh_keys(4), [SIZE] * 4)
        fill(store, 8)


def test_what_is_put_during_a_scan_counts_once(tmp_path, monkeypatch):
    clock, listed = itertools.count().__next__, PoolDirectory.files  # a scan takes time
    evictor = Evictor(PoolDirectory(tmp_path), 20 * SIZE, 10.0, 600.0, clock)
    with contextlib.closing(FileStore(tmp_path, budget=9999 * SIZE)) as other:
        fill(other, 20, age_s=300)

        def files(directory):
            evictor.admit_anyway([SIZE] * 3)
            fill(other, 3)
            evictor.settle([SIZE] * 3)
            return listed(directory)

        monkeypatch.setattr(PoolDirectory, "files", files)
        assert [evictor.admit([SIZE]) for _ in range(2)] == [1, 1]


def test_a_chain_goes_from_its_end(store):
    keys = fill(store, 16)
    assert store.match(keys) == 16
    ends = [path_of(store, key).stat().st_mtime_ns for key in keys]
    assert ends == sorted(set(ends), reverse=True)


def test_the_age_of_what_goes_next_is_that_of_the_oldest_unused_value(store):
    assert store.oldest_age_s([SIZE]) is None
    old, young = fill(store, 10, age_s=300), fill(store, 12, age_s=100)
    left = stored(store, old)
    assert 299 < store.oldest_age_s([SIZE]) < 360
    assert store.match(left) == len(left)
    assert 99 < store.oldest_age_s([SIZE]) < 160
    store.match(stored(store, young))
    assert store.oldest_age_s([SIZE]) is None  # the next put looks again


def test_a_value_is_kept_for_a_moment_after_its_put(store):
    keys = fresh_keys(30)
    with pytest.raises(StoreFull) as caught:
        put(store, keys, [content(key, SIZE) for key in keys])
    assert stored(store, keys) == keys[: caught.value.num_done]
    assert 16 <= caught.value.num_done <= 20


@pytest.mark.requirement("C3", "tails expire early, and have the bytes of their tokens only")
def test_tails_and_markers_past_their_time_go_before_any_block(store):
    block = fresh_keys(1)[0]
    old = [BlockKey(f"{block}:partial:3"), BlockKey("pds1:00:handoff:11:0:done")]
    young = [BlockKey(f"{block}:partial:4"), BlockKey("pds1:00:handoff:12:0:done")]
    for keys, age_s in ((old, 601.0), (young, 599.0), ([block], 10_000.0)):
        put(store, keys, [content(key, 64) for key in keys])
        for key in keys:
            age(store, key, age_s)
    fill(store, 2)
    assert stored(store, [*old, *young, block]) == [*young, block]


def test_puts_go_on_while_another_process_evicts(store):
    fill(store, 18, age_s=100)
    lock = try_lock(f"{root_of(store)}/pool.lock")
    assert lock is not None
    fill(store, 2)
    with pytest.raises(StoreFull):
        fill(store, 8)
    os.close(lock)
    fill(store, 8)


def test_a_file_behind_a_linked_directory_is_never_evicted(store, tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    for n in range(30):
        (others / f"document {n}").write_bytes(b"x" * SIZE)
        os.utime(others / f"document {n}", (1e9, 1e9))
    keys = fill(store, 3, age_s=100)
    unused = next(n for n in range(256) if not (root_of(store) / f"{n:02x}").exists())
    (root_of(store) / f"{unused:02x}").symlink_to(others)
    for _ in range(3):
        fill(store, 16, age_s=50)
    assert len(list(others.glob("document *"))) == 30
    assert stored(store, keys) == []


def test_a_marker_is_taken_by_a_store_that_is_full_of_leases(store):
    keys = fill(store, 18)
    store.match(keys)
    with pytest.raises(StoreFull):
        fill(store, 20)
    failed = BlockKey("pds1:00:handoff:12:0:failed")
    assert put(store, [failed], [b"x" * 64]) == 1
    assert store.match([failed]) == 1
    assert stored(store, keys) == keys


def test_a_large_pool_is_looked_at_beside_its_puts(tmp_path):
    """Nobody waits for it: here the look cannot even begin before the put has returned."""
    step = 64 << 20
    directory = PoolDirectory(tmp_path / "pool")
    evictor = Evictor(directory, 20 * step, 10.0, 600.0)
    assert evictor.admit([1]), "the first put looks itself"
    evictor.settle([1])
    place = tmp_path / "pool" / "00"
    place.mkdir()
    for n in range(19):
        with (place / f"{n}").open("wb") as file:
            file.truncate(step)  # takes no room
        os.utime(place / f"{n}", (1e9 + n, 1e9 + n))
    lock = directory.lock()
    assert lock is not None
    assert evictor.admit([2 * step])
    evictor.settle([2 * step])
    assert len(list(place.iterdir())) == 19
    os.close(lock)
    eventually(lambda: len(list(place.iterdir())) == 18)
    assert not (place / "0").exists(), "the oldest goes"
    evictor.close()
    assert "pdstore-evictor" not in {thread.name for thread in threading.enumerate()}


def test_a_large_pool_that_is_over_its_budget_makes_room_before_it_takes_more(tmp_path):
    step = 64 << 20
    directory = PoolDirectory(tmp_path / "pool")
    evictor = Evictor(directory, 20 * step, 10.0, 600.0)
    assert evictor.admit([19 * step])
    place = tmp_path / "pool" / "00"
    place.mkdir()
    with (place / "old").open("wb") as file:
        file.truncate(19 * step)
    os.utime(place / "old", (1e9, 1e9))
    evictor.settle([19 * step])
    assert evictor.admit([2 * step])
    assert not (place / "old").exists()
    evictor.close()
