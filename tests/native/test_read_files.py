"""Files read by the native library: whole or not at all, and summed as `block.checksum` does."""

from __future__ import annotations

import errno
import os
import random

import pytest

from pdstore import Reason
from pdstore.format.block import checksum
from pdstore.native.abi import OTHER_LENGTH
from pdstore.native.library import address_of
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import empty_slots, put
from tests.support.kv import POISON, Instance

PIECE = 256 << 10  # what is summed at a time


@pytest.fixture
def read(library, tmp_path):
    """Reads files of these names: (why it stopped, checksums, the bytes)."""

    def read(names, sizes):
        buffers = [memoryview(bytearray(b"\xee" * (size + 8))) for size in sizes]
        paths = [str(tmp_path / name) for name in names]
        sums, why = library.read_files(paths, [address_of(b) for b in buffers], sizes)
        for buffer, size in zip(buffers, sizes, strict=True):
            assert bytes(buffer[size:]) == b"\xee" * 8, "written beyond the slot"
        return why, sums, [bytes(b[:size]) for b, size in zip(buffers, sizes, strict=True)]

    return read


@pytest.mark.parametrize(
    "size", [64, 65, 100, 4096, PIECE - 1, PIECE, PIECE + 1, PIECE + 63, 3 * PIECE + 17]
)
def test_the_sum_is_the_checksum_of_the_value(read, tmp_path, size):
    value = random.Random(size).randbytes(size)
    (tmp_path / "a").write_bytes(value)
    assert read(["a"], [size]) == (0, [checksum(memoryview(value))], [value])
    changed = bytearray(value)
    changed[56:64] = b"\0" * 8  # the checksum's own place
    assert checksum(memoryview(changed)) == checksum(memoryview(value))


def test_it_stops_at_the_first_file_that_is_not_there(read, tmp_path):
    for name in "ac":
        (tmp_path / name).write_bytes(b"x" * 100)
    why, sums, values = read(["a", "b", "c"], [100] * 3)
    assert (why, len(sums)) == (errno.ENOENT, 1)
    assert values[2] == b"\xee" * 100


@pytest.mark.parametrize("size", [0, 63, 99, 101, 300, PIECE, PIECE + 101])
def test_a_file_of_another_length_is_none(read, tmp_path, size):
    (tmp_path / "a").write_bytes(b"x" * size)
    assert read(["a"], [100])[:2] == (OTHER_LENGTH, [])


def test_what_is_no_file_is_not_read_and_hangs_nobody(read, tmp_path):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    assert read(["directory"], [100])[0] == errno.EISDIR
    assert read(["pipe"], [100])[0] == OTHER_LENGTH
    assert read(["link"], [100])[0] == errno.ELOOP


def test_less_than_a_header_is_refused(read, tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 63)
    with pytest.raises(ValueError, match="header"):
        read(["a"], [63])


def test_the_file_store_sums_what_it_reads(library, tmp_path):
    store = FileStore(tmp_path / "pool", library=lambda: library)
    keys = fresh_keys(4)
    values = [content(key, 1000) for key in keys]
    put(store, keys[:3], values[:3])
    slots = empty_slots([1000] * 4)
    sums = [0] * 4
    assert store.get_with_checksums(keys, slots, sums) == 3
    assert sums == [*[checksum(memoryview(value)) for value in values[:3]], 0]
    store.close()


def test_a_flipped_bit_in_a_file_is_a_miss(library, tmp_path):
    store = FileStore(tmp_path / "pool", library=lambda: library)
    p, d = Instance(store, native="require"), Instance(store, fill=POISON, native="require")
    prompt, blocks = range(300), list(range(1, 20))
    p.pool.save(p.cache.keys(prompt), blocks).wait(10)
    third = p.cache.keys(prompt).store_keys(p.namespace.parts)[2]
    (path,) = (tmp_path / "pool").rglob(third)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    result = d.pool.load(d.cache.keys(prompt), blocks).wait(10)
    assert (result.num_tokens, result.reason) == (2 * p.layout.block_tokens, Reason.CORRUPT)
    assert not path.exists(), "what did not verify is removed"
    p.close()
    d.close()
    store.close()
