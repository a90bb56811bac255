"""Whose clock leases count by: the file system's, because hosts' clocks may be hours apart."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial

import pytest

from pdstore.store.file.clock import FileSystemClock
from pdstore.store.file.store import FileStore
from tests.support.clock import Clock
from tests.support.file_pool import SIZE, fill, path_of, root_of, stored
from tests.support.fuse_mount import mounted

_S = 10**9
SKEWS_S = (30, -30, 1800, 7200, -1800, -7200)


@pytest.fixture
def skewed(monkeypatch):
    """Sets this host's clock wrong by so many seconds, as all of Python sees it."""
    here, here_ns = time.time, time.time_ns

    def skewed(seconds):
        monkeypatch.setattr(time, "time", lambda: here() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: here_ns() + seconds * _S)

    return skewed


@pytest.fixture
def other(store, closed_after):
    """The same pool on another host."""
    return closed_after(FileStore(root_of(store), budget=20 * SIZE))


@pytest.mark.misconfiguration("D's clock is an hour off")
@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_lease_holds_against_an_evictor_whose_clock_is_wrong(tmp_path, skewed, skew_s):
    pool = partial(FileStore, tmp_path / "pool", budget=20 * SIZE, lease_s=60.0)
    with contextlib.closing(pool()) as store:
        leased, began = fill(store, 8), time.time() - 45
        for key in leased:
            os.utime(path_of(store, key), (began, began + 60))
    skewed(skew_s)
    with contextlib.closing(pool()) as other:
        used_later = fill(other, 8, age_s=20 + skew_s)  # really 20 s ago, and not leased
        fill(other, 8, age_s=20 + skew_s)
        assert stored(other, leased) == leased
        assert len(stored(other, used_later)) < 8


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_lease_holds_that_a_host_wrote_whose_clock_is_wrong(store, other, skewed, skew_s):
    leased = fill(store, 8)
    skewed(skew_s)
    assert other.match(leased) == 8
    skewed(0)
    fill(store, 16, age_s=300)
    assert stored(store, leased) == leased
    end = path_of(store, leased[0]).stat().st_mtime
    assert time.time() + 5 < end <= time.time() + store.lease_s + 1


def test_a_lease_holds_on_a_file_system_that_counts_in_seconds(tmp_path):
    with (
        mounted(tmp_path, coarse="1s") as disk,
        contextlib.closing(FileStore(disk.at / "pool", budget=20 * SIZE)) as store,
    ):
        leased = fill(store, 8)
        assert store.match(leased) == 8
        unleased = fill(store, 8, age_s=300)
        fill(store, 8, age_s=200)
        assert stored(store, leased) == leased
        assert len(stored(store, unleased)) < 8


def test_the_age_of_a_value_is_told_by_the_file_systems_clock(store, other, skewed):
    keys = fill(store, 2, age_s=50)
    skewed(3600)
    ages = [value.age_s for value in other.stored_values()]
    assert [49 < age < 90 for age in ages] == [True] * len(keys)


def test_the_file_that_marks_a_pool_is_touched_so_that_no_cleaner_takes_it_for_old(store):
    lock = root_of(store) / "pool.lock"
    os.utime(lock, (1e9, 1e9))
    fill(store, 20)
    assert time.time() - lock.stat().st_mtime < 60


class Server:
    """A file system's clock, 7,000 s ahead, of which each answer takes a while."""

    def __init__(self) -> None:
        self.here, self.takes_s, self.num_asked = Clock(1000.0), 0.0, 0
        self.is_gone = False

    def local_ns(self):
        return int(self.here() * _S)

    def stamp(self):
        if self.is_gone:
            raise FileNotFoundError
        self.num_asked += 1
        self.here.now += self.takes_s
        return int((self.here.now + 7000) * _S)


def test_the_file_system_is_asked_for_its_time_now_and_then():
    server = Server()
    clock = FileSystemClock(server.stamp, 10.0, server.local_ns)
    assert server.num_asked == 0
    for _ in range(30):
        assert clock.now_ns() == (server.here.now + 7000) * _S
        server.here.now += 1
    assert server.num_asked == 3
    clock.measured_ns()
    assert server.num_asked == 4


def test_a_file_system_that_hangs_or_fails_does_not_move_the_time():
    server = Server()
    clock = FileSystemClock(server.stamp, 10.0, server.local_ns)
    server.is_gone = True
    with pytest.raises(OSError):
        clock.now_ns()
    server.is_gone = False
    clock.now_ns()
    server.takes_s, server.here.now = 40.0, server.here.now + 60
    assert clock.now_ns() == (server.here.now + 7000) * _S
    server.is_gone = True
    server.here.now += 60
    assert clock.now_ns() == (server.here.now + 7000) * _S
