"""Values written and summed by the native library: whole or not at all, each with its checksum."""

from __future__ import annotations

import errno
import random

import pytest

from pdstore.format.block import HEADER_BYTES, START_BYTES, checksum
from pdstore.native.library import address_of
from pdstore.testing.values import filled_slots
from tests.support.native_kit import addresses_and_sizes
from tests.support.swap_case import SwapBench

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


def test_a_temporary_name_that_is_taken_stores_nothing_and_no_link_is_followed(write, tmp_path):
    (tmp_path / "new-0").write_bytes(b"somebody's")
    assert write(["a"], [b"y" * 64])[0] == (0, errno.EEXIST)
    assert files_in(tmp_path) == ["new-0"]
    (tmp_path / "new-0").unlink()
    (tmp_path / "target").write_bytes(b"somebody's")
    (tmp_path / "new-0").symlink_to("target")
    (tmp_path / "a").symlink_to("nowhere")
    assert write(["b"], [b"y" * 64])[0] == (0, errno.EEXIST)
    (tmp_path / "new-0").unlink()
    assert write(["a"], [b"y" * 64])[0] == (1, 0), "the name is taken"
    assert (tmp_path / "target").read_bytes() == b"somebody's"
    assert not (tmp_path / "nowhere").exists()


def test_the_sums_of_many_values_are_those_of_each(library):
    chance = random.Random(0)
    sizes = [HEADER_BYTES, HEADER_BYTES + 1, 4096, 240, 241, 1 << 20, (1 << 20) + 7]
    values = [memoryview(bytearray(chance.randbytes(size))) for size in sizes]
    sums = library.sum_values([address_of(value) for value in values], sizes)
    assert sums == [checksum(value) for value in values]
