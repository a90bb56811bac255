"""ChunkMover: chunks go through a buffer of any size, and shares are even."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreTimeout
from pdstore.outcome import Reason
from pdstore.store.memory import MemoryStore
from pdstore.testing.threads import start_background
from pdstore.testing.values import fresh_keys, put
from pdstore_lmcache.chunk_mover import Chunk, ChunkFinder, ChunkMover
from pdstore_lmcache.chunk_names import ChunkName
from pdstore_lmcache.chunk_task import ChunkTask, Ended
from tests.support.kv import eventually

SIZES = (100, 5000, 4096, 1, 9000)
NAMES = [
    ChunkName(key, bytes.fromhex(key.split(":")[1]), bytes.fromhex(key[-32:]))
    for key in fresh_keys(len(SIZES))
]


@pytest.fixture
def ends():
    return []


@pytest.fixture
def run(ends):
    """Calls a mover's method as a worker does; the last of `ends` says what became of it."""

    def run(move, chunks):
        task = ChunkTask(len(SIZES), 1, 60.0, ends.append)
        task.share_ended(move(task, chunks))
        return ends[-1]

    return run


def mover_of(store, num_bytes=64 << 10):
    return ChunkMover(store, ChunkFinder(store), memoryview(bytearray(num_bytes)))


def chunks(fill=None):
    """Each chunk's bytes are its number and 1, or `fill`."""
    return [
        Chunk(n, name, memoryview(bytearray([n + 1 if fill is None else fill] * size)))
        for n, (name, size) in enumerate(zip(NAMES, SIZES, strict=True))
    ]


def test_a_chunk_that_is_missing_keeps_no_other_from_coming(run):
    store = MemoryStore()
    mover, loaded = mover_of(store), chunks(fill=0)
    run(mover.save, [each for each in chunks() if each.number not in (1, 4)])
    ended = run(mover.load, loaded)
    assert ended.done == (True, False, True, True, False)
    assert ended.reason is Reason.LOST
    assert not any(loaded[1].memory)


@pytest.mark.parametrize("length", [64 + 5000, 64, 7000])
def test_a_wrong_value_is_removed_and_never_copied(run, length):
    store = MemoryStore()
    put(store, [NAMES[1].key], [b"x" * length])
    loaded = chunks(fill=0)
    ended = run(mover_of(store).load, loaded[1:2])
    assert ended.reason is Reason.CORRUPT
    assert not any(loaded[1].memory)
    assert store.match([NAMES[1].key]) == 0


def test_nothing_is_copied_once_the_task_has_ended(ends):
    store = MemoryStore()
    for move in (mover_of(store).save, mover_of(store).load):
        task = ChunkTask(len(SIZES), 1, 60.0, ends.append)
        task.end(Reason.DEADLINE)
        moved = chunks(fill=0)
        move(task, moved)
        assert not any(any(chunk.memory) for chunk in moved)
    assert store.match([NAMES[0].key]) == 0


def test_the_end_of_a_task_waits_for_a_copy(ends):
    task, error = ChunkTask(2, 2, 60.0, ends.append), StoreTimeout("late")
    with task.copying() as may_copy:
        assert may_copy
        join = start_background(lambda: task.end(Reason.STORE_SLOW, error))
        eventually(lambda: task.is_over)
        assert not ends
        task.set_done(1)
    join(60.0)
    task.share_ended()
    task.end(Reason.DEADLINE)
    assert ends == [Ended((False, True), Reason.STORE_SLOW, error)]
