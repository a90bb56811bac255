"""Values as files: read and written whole or not at all, in turn, up to the first that fails."""

from __future__ import annotations

import errno
import os

import pytest

from pdstore.store.file.files import OTHER_LENGTH, read_values, write_values
from pdstore.testing.values import empty_slots, filled_slots


@pytest.fixture
def paths(tmp_path):
    return [str(tmp_path / name) for name in "abc"]


def read(paths, sizes):
    slots = empty_slots(sizes)
    num_done, why = read_values(paths, slots)
    return num_done, why, [bytes(slots.value(i)) for i in range(num_done)]


def write(tmp_path, paths, values):
    ended = write_values(str(tmp_path / "unfinished"), paths, filled_slots(values))
    assert not (tmp_path / "unfinished").exists()
    return tuple(ended)


def test_what_was_written_is_read(tmp_path, paths):
    values = [b"a" * 100, b"b", b"c" * 300_000]
    assert write(tmp_path, paths, values) == (3, 0)
    assert read(paths, [100, 1, 300_000]) == (3, 0, values)
    assert os.stat(paths[0]).st_mode & 0o777 == 0o600


def test_a_file_that_is_there_stays_and_counts_as_written(tmp_path, paths):
    for path in paths[:2]:
        write(tmp_path, [path], [b"first"])
    assert write(tmp_path, paths, [b"later"] * 3) == (3, 0)
    assert read(paths, [5] * 3) == (3, 0, [b"first", b"first", b"later"])


def test_reading_stops_at_the_first_file_that_is_not_there(tmp_path, paths):
    write(tmp_path, [paths[0], paths[2]], [b"x"] * 2)
    assert read(paths, [1] * 3) == (1, errno.ENOENT, [b"x"])


@pytest.mark.parametrize("length", [0, 99, 101, 300])
def test_reading_stops_at_a_file_of_another_length(tmp_path, paths, length):
    (tmp_path / "a").write_bytes(b"x" * length)
    assert read(paths, [100] * 3) == (0, OTHER_LENGTH, [])


def test_writing_stops_at_the_first_file_that_cannot_be_written(tmp_path, paths):
    paths[1] = str(tmp_path / "missing" / "place" / "b")
    assert write(tmp_path, paths, [b"x"] * 3) == (1, errno.ENOENT)
    assert not os.path.exists(paths[2])


def test_the_directory_of_a_file_is_made_for_its_owner_alone(tmp_path):
    paths = [str(tmp_path / "x" / name) for name in "ab"]
    assert write(tmp_path, paths, [b"x"] * 2) == (2, 0)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


def test_what_is_no_regular_file_is_not_read_and_hangs_nobody(tmp_path, paths):
    os.mkfifo(paths[0])
    os.mkdir(paths[1])
    os.symlink("elsewhere", paths[2])
    whys = [read([path], [100])[1] for path in paths]
    assert whys == [OTHER_LENGTH, errno.EISDIR, errno.ELOOP]
