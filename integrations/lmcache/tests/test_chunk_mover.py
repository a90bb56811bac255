"""ChunkMover: chunks go through a buffer of any size, and shares are even."""

from __future__ import annotations

import pytest

from pdstore.errors import ConfigError, StoreTimeout
from pdstore.outcome import Reason
from pdstore.store.memory import MemoryStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.threads import start_background
from pdstore.testing.values import fresh_keys, put
from pdstore_lmcache.chunk_mover import Chunk, ChunkFinder, ChunkMover, shares
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


@pytest.mark.parametrize("num_bytes", [12 << 10, 24 << 10, 64 << 10])
def test_chunks_of_any_length_go_through_a_buffer_of_any_size(run, num_bytes):
    mover, loaded = mover_of(MemoryStore(), num_bytes), chunks(fill=0)
    assert all(run(mover.save, chunks()).done)
    assert all(run(mover.load, loaded).done)
    assert [chunk.memory for chunk in loaded] == [chunk.memory for chunk in chunks()]


@pytest.mark.parametrize("wrapper", [lambda store: store, WrapperStore])
@pytest.mark.parametrize("stored", [[], [0, 1], [2, 3], [0, 3, 4], [0, 1, 2, 3, 4]])
def test_what_is_stored_is_found_behind_gaps_too(wrapper, stored):
    store, names = MemoryStore(), [name.key for name in NAMES]
    keys = [names[number] for number in stored]
    put(store, keys, [b"v"] * len(keys))
    assert ChunkFinder(wrapper(store)).find(names) == set(keys)


def test_a_buffer_that_holds_no_chunk_is_refused(run):
    with pytest.raises(ConfigError, match=r"9000 bytes does not fit .* PDSTORE_STAGING"):
        run(mover_of(MemoryStore(), 8 << 10).save, chunks())


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


@pytest.mark.parametrize(
    ("sizes", "most", "least", "expected"),
    [
        ([], 4, 1, [range(0)]),
        ([5], 4, 1, [range(1)]),
        ([1] * 8, 4, 1, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        ([1] * 8, 4, 5, [range(5), range(5, 8)]),
        ([9, 1, 1, 1], 2, 1, [range(1), range(1, 4)]),
    ],
)
def test_shares_are_about_even(sizes, most, least, expected):
    assert shares(sizes, most, least) == expected
