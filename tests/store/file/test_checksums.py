"""Checksums in the pass of the read: the native library and Python do the same."""

from __future__ import annotations

import contextlib
import errno
import random
from functools import partial

import pytest

from pdstore.format.block import checksum
from pdstore.native.abi import OTHER_LENGTH
from pdstore.native.library import load_library
from pdstore.store.file.checksums import ChecksumFiles
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import empty_slots, put
from tests.support.file_pool import SIZE
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


@pytest.mark.parametrize(
    "size", [64, 65, 4096, PIECE - 1, PIECE, PIECE + 1, PIECE + 64, 3 * PIECE + 17]
)
def test_a_value_is_read_with_its_checksum(files, tmp_path, size):
    value = random.Random(size).randbytes(size)
    (tmp_path / "a").write_bytes(value)
    back, sums = empty_slots([size]), [0]
    assert files.read([str(tmp_path / "a")], back, sums) == (1, 0)
    assert back.value(0) == value
    assert sums == [checksum(memoryview(value))]


def test_reading_stops_at_the_first_that_cannot_be_read(files, tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 101)
    sums = [7] * 3
    for paths, ended in (("acb", (1, errno.ENOENT)), ("abc", (1, OTHER_LENGTH))):
        full = [str(tmp_path / name) for name in paths]
        assert files.read(full, empty_slots([100] * 3), sums) == ended
        assert sums == [checksum(memoryview(b"x" * 100)), 7, 7]


def test_no_files_are_no_work(files):
    assert files.read([], empty_slots([]), []) == (0, 0)


def test_a_store_gets_with_checksums_what_it_puts(store):
    keys, sums = fresh_keys(3), [0] * 3
    values = [content(key, SIZE) for key in keys]
    assert put(store, keys, values) == 3
    back = empty_slots([SIZE] * 3)
    assert store.get_with_checksums(keys, back, sums) == 3
    assert [bytes(back.value(i)) for i in range(3)] == values
    assert sums == [checksum(memoryview(value)) for value in values]


def test_a_value_without_room_for_a_checksum_is_refused(store):
    with pytest.raises(ValueError, match="fewer than 64 bytes"):
        store.get_with_checksums(fresh_keys(1), empty_slots([63]), [0])
