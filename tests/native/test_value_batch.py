"""Values of an arena and of files, in single calls of the library."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from array import array

import pytest

from pdstore.errors import StoreFull
from pdstore.format.block import HEADER_BYTES, START_BYTES, checksum
from pdstore.format.layout import Layout
from pdstore.native.arena import ValueBatch
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import filled_slots, fresh_keys, get, put
from pdstore.worker.swap.base import BlockCopy
from pdstore.worker.swap.native import NativeSwap
from tests.support.arena_kit import place_of
from tests.support.kv import LAYERS, caches_of, eventually, settings_of
from tests.support.native_kit import addresses_and_sizes
from tests.support.swap_case import SwapBench

TOKENS = 16
STARTS = bytes([3]) * 56 + bytes([5]) * 56


class Rig:
    """An arena, and a paged cache with an engine that copies between the two."""

    def __init__(self, library, directory, **options) -> None:
        self.layout = Layout.of(
            settings_of(block_tokens=TOKENS),
            dtype="float32",
            layers=LAYERS,
            engine_block_tokens=TOKENS,
            rope="",
        )
        [self.part] = self.layout.owned_parts
        self.size = HEADER_BYTES + self.layout.payload_bytes(self.part, TOKENS)
        self.swap = NativeSwap(library, self.layout, caches_of(self.layout, 8))
        self.store = ArenaStore(library, "test", directory=directory, size=8 << 20, **options)

    def batch(self, keys, blocks, **changes) -> ValueBatch:
        count = len(blocks)
        columns = [self.part] * count, [[block] for block in blocks], [TOKENS] * count
        items, block_ids = self.swap.pack_columns(*columns, [0] * count, [0] * count)
        return ValueBatch(
            **{
                "keys": keys,
                "sizes": array("q", [self.size] * len(blocks)).tobytes(),
                "starts": b"".join(bytes([block]) * 56 for block in blocks),
                "engine": self.swap.engine,
                "items": items,
                "block_ids": block_ids,
                **changes,
            }
        )

    def payload_of(self, block) -> bytes:
        payload = memoryview(bytearray(self.size - HEADER_BYTES))
        self.swap.gather([BlockCopy(self.part, [block], TOKENS, 0, payload)])
        return bytes(payload)

    def close(self) -> None:
        self.swap.close()
        self.store.close()


@pytest.fixture
def rig(library, tmp_path, closed_after):
    return closed_after(Rig(library, tmp_path))


def stored(rig, blocks):
    keys = fresh_keys(len(blocks))
    filled = rig.store.fill([rig.batch(keys, blocks)])
    assert filled == ([0, 1], 2 * rig.size, None)
    assert rig.store.counts().reserved == 0
    return keys


def test_batches_are_stored_in_one_call_and_their_values_are_numbered_through(rig):
    keys = stored(rig, [3, 5])
    others = fresh_keys(3)
    batches = [
        rig.batch([others[0], keys[0]], [1, 3]),
        rig.batch([keys[1]], [5]),
        rig.batch(others[1:], [2, 4]),
    ]
    filled = rig.store.fill(batches)
    assert filled == ([0, 3, 4], 3 * rig.size, None), "the others were stored before"
    for value, block in zip(get(rig.store, others, [rig.size] * 3), (1, 2, 4), strict=True):
        assert value[HEADER_BYTES:] == rig.payload_of(block)


def test_a_batch_without_room_stores_nothing_and_holds_nothing(rig):
    most = (8 << 20) // rig.size + 1
    keys = fresh_keys(2 + most)
    batches = [rig.batch(keys[:2], [3, 5]), rig.batch(keys[2:], [1] * most)]
    assert isinstance(rig.store.fill(batches).error, StoreFull)
    assert rig.store.match(keys) == 0
    assert rig.store.counts().reserved == 0


def test_a_value_of_another_header_stops_all_copies(rig):
    keys, before = stored(rig, [3, 5]), rig.payload_of(6)
    assert rig.store.start_scatter(rig.batch(keys, [6, 7], starts=bytes([3]) * 112)) is None
    assert rig.payload_of(6) == before


def test_a_damaged_value_is_not_among_those_that_are_right(rig):
    keys = stored(rig, [3, 5])
    place_of(rig.store, keys[1], rig.size)[200] ^= 1
    copies = rig.store.start_scatter(rig.batch(keys, [6, 7], starts=STARTS))
    assert copies.wait(10)
    assert rig.store.confirm(copies) == (2, 1)


@pytest.mark.parametrize("gone", range(2))
def test_a_value_that_goes_under_its_copy_does_not_count(rig, gone):
    keys = stored(rig, [3, 5])
    copies = rig.store.start_scatter(rig.batch(keys, [6, 7], starts=STARTS))
    rig.store.remove([keys[gone]])
    put(rig.store, [keys[gone]], [bytes(rig.size)])
    assert copies.wait(10)
    assert rig.store.confirm(copies)[0] == gone, "the same key again is another value"


def test_values_that_are_taken_are_kept_while_they_are_read_and_no_longer(library, tmp_path):
    fresh_s = 0.4
    with contextlib.closing(Rig(library, tmp_path, fresh_s=fresh_s)) as rig:
        keys = stored(rig, [3, 5])
        time.sleep(fresh_s)
        for is_kept in (True, False):
            assert rig.store.match(keys) == 2, "a lookup leases them for longer"
            copies = rig.store.start_scatter(rig.batch(keys, [6, 7], starts=STARTS))
            time.sleep(0.0 if is_kept else fresh_s)
            others = fresh_keys(2 * (8 << 20) // rig.size)
            with contextlib.suppress(StoreFull):
                put(rig.store, others, [bytes(rig.size)] * len(others))
            assert copies.wait(10)
            assert rig.store.confirm(copies)[0] == 2 * is_kept


def test_what_a_dead_process_was_filling_comes_back_though_a_child_of_its_lives(
    library, tmp_path, rig
):
    """The child has inherited the arena's file, whose lock says that its parent is alive."""
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        mine = Rig(library, tmp_path)
        library.delay(60_000_000)
        batch = mine.batch(fresh_keys(2), [3, 5])
        threading.Thread(target=mine.store.fill, args=[[batch]], daemon=True).start()
        eventually(lambda: mine.store.counts().reserved == 2)
        if os.fork() == 0:
            os.write(to_parent[1], b"1")
            os.read(to_child[0], 1)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(to_parent[0], 1) == b"1"
    try:
        assert rig.store.counts().reserved == 2
        with contextlib.suppress(StoreFull):  # more than there is: it looks for the dead
            put(rig.store, fresh_keys(24), [bytes(1 << 19)] * 24)
        assert rig.store.counts()[1:3] == (0, 2), "its death was seen"
    finally:
        os.write(to_child[1], b"1")
        for end in (*to_child, *to_parent):
            os.close(end)


PIECE = 256 << 10  # what is summed at a time


@pytest.fixture
def bench(library):
    bench = SwapBench(library, "cpu")
    yield bench
    bench.swap.close()


@pytest.fixture
def write(bench, tmp_path):
    """Writes payloads to files of these names; returns how many, why not more, and the slots."""

    def write(names, values):
        slots = filled_slots([(b"\xee" * 64 + value[64:])[: len(value)] for value in values])
        starts = b"".join([value[:START_BYTES] for value in values])
        paths = [str(tmp_path / name) for name in names]
        places = addresses_and_sizes(slots)
        ended = bench.swap.engine.write_values(str(tmp_path / "new"), paths, *places, starts)
        return ended, slots

    return write


def sealed(value: bytes) -> bytes:
    """The value with its checksum in place."""
    sum_ = checksum(memoryview(value)).to_bytes(8, "little")
    return value[:START_BYTES] + sum_ + value[START_BYTES + 8 :]


def files_in(folder) -> list[str]:
    """The names of all files below a folder, links among them."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize(
    "size", [64, 65, 4096, PIECE - 1, PIECE, PIECE + 1, PIECE + 64, 3 * PIECE + 17]
)
def test_a_value_is_written_with_its_header_in_memory_too(write, tmp_path, size):
    values = [random.Random(size + n).randbytes(size) for n in range(3)]
    ended, slots = write(["a", "b", "c"], values)
    assert ended == (3, 0)
    for i, name in enumerate("abc"):
        assert slots.value(i) == sealed(values[i])
        assert (tmp_path / name).read_bytes() == sealed(values[i])
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert files_in(tmp_path) == ["a", "b", "c"]


def test_a_file_that_is_there_stays_and_directories_are_their_owners(write, tmp_path):
    (tmp_path / "b").write_bytes(b"first" * 20)
    assert write(["a", "b", "x/c"], [b"y" * 100] * 3)[0] == (3, 0)
    assert (tmp_path / "b").read_bytes() == b"first" * 20
    assert files_in(tmp_path) == ["a", "b", "x/c"]
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("position", range(5))
def test_the_first_that_cannot_be_written_is_told(write, tmp_path, position):
    (tmp_path / "file").write_bytes(b"no directory")
    names = list("abcde")
    names[position] = "file/x"
    assert write(names, [b"y" * 100] * 5)[0] == (position, errno.ENOTDIR)
    assert set(files_in(tmp_path)) >= {"file", *names[:position]}
    assert not (tmp_path / "new").exists()


def test_nothing_is_stored_where_the_directory_above_is_missing(write, tmp_path):
    assert write(["gone/x/a"], [b"y" * 100])[0] == (0, errno.ENOENT)
    assert files_in(tmp_path) == []
