"""A pool's budget: half of the disk's free room by default, also if that comes later."""

from __future__ import annotations

import contextlib
import os
import subprocess
from functools import partial

import pytest

from pdstore.errors import ConfigError, StoreFull
from pdstore.store.file.budget import default_budget
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import put
from tests.support.clock import Clock
from tests.support.file_pool import SIZE, fill
from tests.support.fuse_mount import mounted
from tests.support.kv import Instance

MIB = 1 << 20


@pytest.mark.requirement("R12", "defaults fit a small host", note="staging is 1 GiB")
def test_half_of_a_small_file_system_is_the_default_budget(full_disk):
    directory = PoolDirectory(full_disk / "pool")
    before = default_budget(directory)
    assert 1.5 * 2**20 < before <= 2 * 2**20
    with contextlib.closing(FileStore(full_disk / "pool")) as store:
        fill(store, 20)
    assert default_budget(directory) == pytest.approx(before, rel=0.05)


@pytest.mark.misconfiguration("a `?budget=` above its file system")
def test_a_budget_above_the_file_system_is_told_at_the_start(full_disk, caplog):
    with contextlib.closing(FileStore(full_disk / "pool", budget=20 << 30)) as store:
        assert 3 << 20 < store.room().capacity_bytes <= 4 << 20
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "?budget=20.0GiB, and its file system has " in said
    assert "write ?budget=3.6MiB, or use a larger one" in said


def fill_disk(disk, leave):
    """Writes a file of somebody else that leaves so many bytes free."""
    status = os.statvfs(disk)
    with (disk / "logs").open("wb") as logs:
        os.posix_fallocate(logs.fileno(), 0, status.f_bavail * status.f_frsize - leave)
    return disk / "logs"


@pytest.mark.misconfiguration("the disk is full at the start")
@pytest.mark.parametrize("leave", [0, 64 << 10, 256 << 10])
def test_a_disk_that_is_full_at_the_start_ends_no_start_and_is_used_once_it_is_freed(
    full_disk, caplog, closed_after, leave
):
    logs, clock = fill_disk(full_disk, leave), Clock()
    store = closed_after(FileStore(full_disk / "pool", clock=clock))
    assert "the disk is full: " in caplog.text
    assert "free some of it: the pool then grows by itself" in caplog.text
    closed_after(Instance(store, staging="2MiB"))
    with pytest.raises(StoreFull, match=r"the disk is full|No space left|all is leased"):
        fill(store, 8)
    logs.unlink()
    clock.now += 2
    assert len(fill(store, 20)) == 20
    assert store.room().capacity_bytes == pytest.approx(2 * MIB, rel=0.1)


def test_a_disk_without_inodes_at_the_start_is_used_once_it_has_some(full_disk, closed_after):

    subprocess.run(["mount", "-o", "remount,nr_inodes=1", full_disk], check=True)
    clock = Clock()
    store = closed_after(FileStore(full_disk / "pool", clock=clock))
    keys = fresh_keys(2)
    with pytest.raises(StoreFull):
        put(store, keys, [content(key, SIZE) for key in keys])
    subprocess.run(["mount", "-o", "remount,nr_inodes=100", full_disk], check=True)
    clock.now += 2
    assert put(store, keys, [content(key, SIZE) for key in keys]) == 2
    assert store.match(keys) == 2


@pytest.mark.misconfiguration("a `?budget=` below one value, as `?budget=20` without a unit")
def test_a_value_above_the_budget_is_told_with_what_to_write(tmp_path, closed_after):
    store = closed_after(FileStore(tmp_path / "pool", budget=80))
    words = r"bytes is more than \?budget=80B: write a larger one with its unit, like \?budget=20Gi"
    with pytest.raises(ConfigError, match=words):
        Instance(store)
    with pytest.raises(StoreFull, match=r"more than \?budget=80B"):
        fill(store, 1)


def test_a_file_system_that_is_too_small_for_a_value_is_told(full_disk, closed_after):
    store = closed_after(FileStore(full_disk / "pool"))
    assert store.why_too_long(MIB) is None
    said = store.why_too_long(3 * MIB)
    assert "more than half of its file system, which has 4.0MiB: name a directory on a" in said


@pytest.mark.misconfiguration("a file system that does not tell its size")
def test_a_file_system_that_does_not_tell_its_size_wants_a_budget(tmp_path, caplog):
    with mounted(tmp_path, statfs="zero") as disk:
        pool = partial(FileStore, disk.at / "pool")
        with pytest.raises(ConfigError, match=r"does not tell how large it is: .* \?budget=20GiB"):
            pool()
        with contextlib.closing(pool(budget=20 * SIZE)) as store:
            fill(store, 25, age_s=300)
            assert store.make_room(fresh_keys(2), [SIZE] * 2)
            assert store.room().capacity_bytes == 20 * SIZE
            assert not store.doubts


@pytest.mark.misconfiguration("one directory, and another `?budget=` or `?lease=` on D than on P")
@pytest.mark.parametrize(
    ("theirs", "ours", "is_told"),
    [
        ({"budget": 40 * SIZE}, {"budget": 20 * SIZE}, True),
        ({"budget": 20 * SIZE}, {"budget": 40 * SIZE}, True),
        ({"budget": 20 * SIZE}, {}, True),
        ({"lease_s": 10.0}, {"lease_s": 60.0}, True),
        ({"budget": 20 * SIZE}, {"budget": 20 * SIZE}, False),
        ({}, {}, False),
    ],
)
def test_processes_with_another_budget_or_lease_are_told_on_both_sides(
    tmp_path, caplog, closed_after, theirs, ours, is_told
):
    first = closed_after(FileStore(tmp_path / "pool", **theirs))
    fill(first, 1)
    caplog.clear()
    second = closed_after(FileStore(tmp_path / "pool", **ours))
    fill(second, 1)
    words = "another process has, or had, ?budget="
    assert caplog.text.count(words) == is_told
    assert [d.subject for d in second.doubts] == ["budget"] * is_told
    caplog.clear()
    fill(first, 3)
    assert first.make_room(fresh_keys(1), [SIZE])  # as a scan does that is due
    assert caplog.text.count(words) == is_told
    again = closed_after(FileStore(tmp_path / "pool", **theirs))
    assert not again.doubts
    assert "write the same for all" in caplog.text or not is_told


def test_who_only_looks_at_a_pool_leaves_its_terms(tmp_path, closed_after):
    fill(closed_after(FileStore(tmp_path / "pool", budget=20 * SIZE)), 1)
    looking = closed_after(FileStore(tmp_path / "pool"))
    assert len(list(looking.stored_values())) == 1
    assert looking.room().used_bytes == SIZE
    assert (tmp_path / "pool" / "pool.lock").read_text() == "budget=1.2MiB&lease=10"
