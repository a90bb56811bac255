"""Several processes on one store: what they read is whole, also when one is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from pdstore.errors import StoreFull
from pdstore.settings import Settings
from pdstore.store import file_eviction, open_store
from pdstore.store.file import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put

REPOSITORY = Path(__file__).parent.parent
SIZE = 64 << 10
DEADLINE_S = 60.0


def run_in_processes(function, *arguments: tuple) -> list:
    """Calls a function of this module at once in processes of their own; their results."""
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(len(arguments))
    with ProcessPoolExecutor(len(arguments), spawn, start.wait, (DEADLINE_S,)) as pool:
        futures = [pool.submit(function, *args) for args in arguments]
        return [future.result(DEADLINE_S) for future in futures]


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


def test_processes_read_what_the_others_write(url):
    keys = fresh_keys(90)
    shared = keys[:30]
    parts = [shared + keys[start : start + 20] for start in (30, 50, 70)]
    results = run_in_processes(
        write_some_read_all, *[(url, keys, part, i) for i, part in enumerate(parts)]
    )
    assert results == [90, 90, 90]


def open_write_close(root, keys) -> int:
    with contextlib.closing(FileStore(root)) as store:
        return put(store, keys, [content(key, 100) for key in keys])


def test_processes_may_make_the_directory_at_once(tmp_path):
    root, keys = tmp_path / "a" / "pool", fresh_keys(20)
    assert run_in_processes(open_write_close, *[(root, keys)] * 4) == [20] * 4
    assert list((root / "tmp").iterdir()) == []


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


def test_processes_that_evict_keep_the_budget_and_the_leases(tmp_path):
    root, budget, leased = tmp_path / "pool", 60 * SIZE, fresh_keys(5)
    with contextlib.closing(FileStore(root, budget=budget, lease_s=60.0)) as store:
        values = [content(key, SIZE) for key in leased]
        put(store, leased, values)
        assert store.match(leased) == 5
        results = run_in_processes(put_under_pressure, *[(root, budget, i) for i in range(3)])
        assert all(stored >= 150 and found >= 50 for stored, found in results)
        assert sum(file.size for file in store._directory.files()) <= 1.1 * budget
        assert get(store, leased, [SIZE] * 5) == values


HALF_WRITER = """
import os, socket, sys, time
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.testing.values import content, put

url, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url, Settings())

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
import sys, time
from pathlib import Path
from pdstore.store.file import FileStore
store = FileStore(Path(sys.argv[1]))
lock = store._directory.lock()
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
            writer.kill()
            writer.wait(DEADLINE_S)
            assert (store.match([key]), get(store, [key], [size])) == (0, [])
        assert put(store, [key], [content(key, size)]) == 1
        assert get(store, [key], [size]) == [content(key, size)]


def test_what_a_killed_writer_left_is_cleaned_up(tmp_path):
    root, [key] = tmp_path / "pool", fresh_keys(1)
    scratch = root / "tmp"
    with process_at("half", HALF_WRITER, f"file://{root}", key, str(SIZE)) as writer:
        FileStore(root).close()
        [theirs] = scratch.iterdir()
        assert [p.stat().st_size for p in theirs.iterdir() if p.name != "lock"] == [SIZE // 2]
        writer.kill()
        writer.wait(DEADLINE_S)
        FileStore(root).close()
        assert list(scratch.iterdir()) == []


def test_an_evictor_that_was_killed_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(file_eviction, "FRESH_S", 0.0)
    root = tmp_path / "pool"
    with contextlib.closing(FileStore(root, budget=20 * SIZE)) as store:
        keys = fresh_keys(100)
        values = [content(key, SIZE) for key in keys]
        put(store, keys[:15], values[:15])
        with process_at("locked", LOCK_HOLDER, str(root)) as evictor:
            with pytest.raises(StoreFull) as caught:
                put(store, keys[15:], values[15:])
            assert caught.value.num_done >= 5
            evictor.kill()
            evictor.wait(DEADLINE_S)
        for key, value in zip(keys[30:], values[30:], strict=True):
            assert put(store, [key], [value]) == 1
