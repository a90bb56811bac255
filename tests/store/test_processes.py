"""Several processes on one store: what they read is whole, also when one is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from pdstore.errors import StoreFull
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file import eviction as file_eviction
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put
from tests.support.file_pool import root_of

REPOSITORY = Path(__file__).parents[2]
SIZE = 64 << 10
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def in_three_processes():
    """Calls a function of this module in three processes at once, with arguments for each."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, spawn, _keep_barrier, (spawn.Barrier(3),)) as pool:

        def run(function, *arguments: tuple) -> list:
            futures = [pool.submit(_together, function, args) for args in arguments]
            return [future.result(DEADLINE_S) for future in futures]

        yield run


def _keep_barrier(barrier) -> None:
    _together.barrier = barrier


def _together(function, arguments):
    _together.barrier.wait(DEADLINE_S)
    return function(*arguments)


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.redis)])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/pool"
    return request.getfixturevalue("redis_url")


def write_some_read_all(url, keys, own, seed) -> int:
    """Puts some keys and reads all of them, in an order of its own; verifies every value."""
    order = random.Random(seed)
    with contextlib.closing(open_store(url, Settings())) as store:
        to_write, to_read = order.sample(own, len(own)), order.sample(keys, len(keys))
        end = time.monotonic() + DEADLINE_S / 2
        while to_write or to_read:
            assert time.monotonic() < end, f"{len(to_read)} values did not appear"
            if to_write:
                key = to_write.pop()
                assert put(store, [key], [content(key, SIZE)]) == 1
            key = order.choice(to_read)
            values = get(store, [key], [SIZE])
            if values:
                assert values == [content(key, SIZE)]
                to_read.remove(key)
    return len(keys)


def test_processes_read_what_the_others_write(url, in_three_processes):
    keys = fresh_keys(90)
    shared = keys[:30]
    parts = [shared + keys[start : start + 20] for start in (30, 50, 70)]
    results = in_three_processes(
        write_some_read_all, *[(url, keys, part, i) for i, part in enumerate(parts)]
    )
    assert results == [90, 90, 90]


def put_under_pressure(root, budget, seed) -> tuple[int, int]:
    """Puts more than there is room for, reads back at random; how many were stored and found."""
    file_eviction.FRESH_S = 0.0  # a second is the whole test here
    order, keys, found = random.Random(seed), [], 0
    with contextlib.closing(FileStore(root, budget=budget, lease_s=60.0)) as store:
        for [key] in (fresh_keys(1) for _ in range(200)):
            with contextlib.suppress(StoreFull):
                put(store, [key], [content(key, SIZE)])
                keys.append(key)
            asked = order.choice(keys[-20:])
            values = get(store, [asked], [SIZE])
            assert values in ([], [content(asked, SIZE)])
            found += len(values)
    return len(keys), found


def test_processes_that_evict_keep_the_budget_and_the_leases(tmp_path, in_three_processes):
    root, budget, leased = tmp_path / "pool", 60 * SIZE, fresh_keys(5)
    with contextlib.closing(FileStore(root, budget=budget, lease_s=60.0)) as store:
        values = [content(key, SIZE) for key in leased]
        put(store, leased, values)
        assert store.match(leased) == 5
        results = in_three_processes(put_under_pressure, *[(root, budget, i) for i in range(3)])
        assert all(stored >= 50 and found >= 10 for stored, found in results)  # alone 200, 180
        assert sum(path.stat().st_size for path in root_of(store).glob("??/*")) <= 1.1 * budget
        assert get(store, leased, [SIZE] * 5) == values


HALF_WRITER = """
import os, socket, sys, time
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.testing.values import content, put

url, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url, read_settings(store=url, native="off"))  # so Python writes files

def hang():
    print("half", flush=True)
    time.sleep(60)

if url.startswith("file"):
    write = os.write
    os.write = lambda fd, data: (write(fd, data[: size // 2]), hang())
else:
    send = socket.socket.sendall
    def half(self, data):
        if len(data) < size:
            return send(self, data)
        send(self, data[: size // 2])
        hang()
    socket.socket.sendall = half
put(store, [key], [content(key, size)])
"""

LOCK_HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def process_at(line: str, code: str, *arguments):
    """A process that has printed a line and hangs there, until SIGKILL by `kill` or at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == line
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()


def test_a_writer_killed_in_the_middle_of_a_put_leaves_no_half_value(url):
    [key], size = fresh_keys(1), 4 << 20
    with contextlib.closing(open_store(url, Settings())) as store:
        with process_at("half", HALF_WRITER, url, key, str(size)) as writer:
            assert (store.match([key]), get(store, [key], [size])) == (0, [])
            if url.startswith("file"):
                assert sizes_of_unfinished(store) == [size // 2]
                FileStore(root_of(store)).close()
                assert sizes_of_unfinished(store) == [size // 2], "its writer lives"
            writer.kill()
            writer.wait(DEADLINE_S)
            assert (store.match([key]), get(store, [key], [size])) == (0, [])
        if url.startswith("file"):
            for path in (root_of(store) / "tmp").iterdir():
                os.utime(path, (0, 0))
            FileStore(root_of(store)).close()
            assert sizes_of_unfinished(store) == [], "one that opens it later cleans up"
        assert put(store, [key], [content(key, size)]) == 1
        assert get(store, [key], [size]) == [content(key, size)]


def sizes_of_unfinished(store) -> list[int]:
    return [path.stat().st_size for path in (root_of(store) / "tmp").iterdir()]


def test_an_evictor_that_was_killed_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(file_eviction, "FRESH_S", 0.0)
    root = tmp_path / "pool"
    with contextlib.closing(FileStore(root, budget=20 * SIZE)) as store:
        keys = fresh_keys(100)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[:15], values[:15])
        with process_at("locked", LOCK_HOLDER, f"{root}/pool.lock") as evictor:
            with pytest.raises(StoreFull) as caught:
                put(store, keys[15:], values[15:])
            assert caught.value.num_done >= 5
            evictor.kill()
            evictor.wait(DEADLINE_S)
        for key, value in zip(keys[30:], values[30:], strict=True):
            assert put(store, [key], [value]) == 1
