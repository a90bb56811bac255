"""Checksums in the pass of the read and the write: the native library and Python do the same."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from functools import partial

import pytest

from pdstore.errors import StoreFull
from pdstore.format.block import checksum
from pdstore.native.abi import OTHER_LENGTH
from pdstore.native.library import load_library
from pdstore.store.file.checksums import ChecksumFiles
from pdstore.store.file.store import FileStore
from pdstore.store.optional import CHECKSUM_AT
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import empty_slots, filled_slots
from tests.support.file_pool import SIZE, num_temporaries, root_of, stored
from tests.support.kv import settings_of

PIECE = 256 << 10  # what is summed at a time


@pytest.fixture(params=["off", "require"])
def library(request):
    return partial(load_library, settings_of(native=request.param), for_gpu=False)


@pytest.fixture
def files(library):
    return ChecksumFiles(library)


@pytest.fixture
def store(tmp_path, library):
    store = FileStore(tmp_path / "pool", budget=20 * SIZE, library=library)
    with contextlib.closing(store):
        yield store


def sealed(value: bytes) -> bytes:
    """The value with its checksum in place."""
    sum_ = checksum(memoryview(value)).to_bytes(8, "little")
    return value[:CHECKSUM_AT] + sum_ + value[CHECKSUM_AT + 8 :]


@pytest.mark.parametrize(
    "size", [64, 65, 4096, PIECE - 1, PIECE, PIECE + 1, PIECE + 64, 3 * PIECE + 17]
)
def test_a_value_is_written_with_its_checksum_and_read_with_it(files, tmp_path, size):
    value, path = random.Random(size).randbytes(size), str(tmp_path / "a")
    slots = filled_slots([value, b"x" * size])
    assert files.write(str(tmp_path / "new"), [path], slots.part(0, 1)) == (1, 0)
    assert slots.value(0) == sealed(value)
    assert slots.value(1) == b"x" * size, "the slot beside it"
    assert (tmp_path / "a").read_bytes() == sealed(value)
    assert os.stat(path).st_mode & 0o777 == 0o600
    back, sums = empty_slots([size]), [0]
    assert files.read([path], back, sums) == (1, 0)
    assert back.value(0) == sealed(value)
    assert sums == [checksum(memoryview(value))]
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_file_that_is_there_stays_and_counts_as_written(files, tmp_path):
    (tmp_path / "b").write_bytes(b"first" * 20)
    paths = [str(tmp_path / name) for name in "abc"]
    assert files.write(str(tmp_path / "new"), paths, filled_slots([b"y" * 100] * 3)) == (3, 0)
    assert (tmp_path / "b").read_bytes() == b"first" * 20
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_writing_stops_at_the_first_that_cannot_be_written(files, tmp_path):
    paths = [str(tmp_path / name) for name in ("a", "missing/b", "c")]
    slots = filled_slots([b"y" * 100] * 3)
    assert files.write(str(tmp_path / "new"), paths, slots) == (1, errno.ENOENT)
    assert os.listdir(tmp_path) == ["a"]


def test_a_temporary_name_that_is_taken_stores_nothing(files, tmp_path):
    (tmp_path / "new").write_bytes(b"somebody's")
    ended = files.write(str(tmp_path / "new"), [str(tmp_path / "a")], filled_slots([b"y" * 64]))
    assert ended == (0, errno.EEXIST)
    assert os.listdir(tmp_path) == ["new"]


def test_reading_stops_at_the_first_that_cannot_be_read(files, tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 101)
    sums = [7] * 3
    for paths, ended in (("acb", (1, errno.ENOENT)), ("abc", (1, OTHER_LENGTH))):
        full = [str(tmp_path / name) for name in paths]
        assert files.read(full, empty_slots([100] * 3), sums) == ended
        assert sums == [checksum(memoryview(b"x" * 100)), 7, 7]


def test_no_files_are_no_work(files):
    assert files.write("nowhere", [], filled_slots([])) == (0, 0)
    assert files.read([], empty_slots([]), []) == (0, 0)


def test_a_store_puts_with_checksums_what_it_gets_with_them(store):
    keys, sums = fresh_keys(3), [0] * 3
    slots = filled_slots([content(key, SIZE) for key in keys])
    assert store.put_with_checksums(keys, slots) == 3
    back = empty_slots([SIZE] * 3)
    assert store.get_with_checksums(keys, back, sums) == 3
    for i in range(3):
        assert back.value(i) == sealed(content(keys[i], SIZE))
        assert sums[i] == checksum(back.value(i))


def test_a_value_without_room_for_a_checksum_is_refused(store):
    with pytest.raises(ValueError, match="fewer than 64 bytes"):
        store.put_with_checksums(fresh_keys(1), filled_slots([b"x" * 63]))
    with pytest.raises(ValueError, match="fewer than 64 bytes"):
        store.get_with_checksums(fresh_keys(1), empty_slots([63]), [0])


def test_a_put_with_checksums_keeps_the_budget_and_counts(store):
    keys = fresh_keys(30)
    with pytest.raises(StoreFull) as caught:
        store.put_with_checksums(keys, filled_slots([content(key, SIZE) for key in keys]))
    assert stored(store, keys) == keys[: caught.value.num_done]
    assert 16 <= caught.value.num_done <= 20
    assert num_temporaries(store) == 0


@pytest.mark.parametrize("what", ["tmp", "??", "*"])
def test_a_put_with_checksums_makes_the_directories_that_somebody_deleted(store, what):
    for _ in range(2):
        keys = fresh_keys(6)
        values = [content(key, 1000) for key in keys]
        assert store.put_with_checksums(keys, filled_slots(values)) == 6
        assert stored(store, keys) == keys
        for path in root_of(store).glob(what):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_full_disk_is_store_full_for_a_put_with_checksums(full_disk, library):
    with contextlib.closing(
        FileStore(full_disk / "pool", budget=1 << 30, library=library)
    ) as store:
        keys = fresh_keys(100)
        with pytest.raises(StoreFull) as caught:
            store.put_with_checksums(keys, filled_slots([content(key, SIZE) for key in keys]))
        assert 40 < caught.value.num_done <= 64
        assert store.match(keys) == caught.value.num_done
        assert num_temporaries(store) == 0
