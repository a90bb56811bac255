"""Unfinished values: a living writer keeps them, and a dead one's are swept."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pdstore.errors import ConfigError
from pdstore.store.file.directory import PoolDirectory, Scratch, sweep
from pdstore.store.file.store import FileStore
from tests.support.file_pool import fill, root_of


def test_a_closed_store_leaves_nothing_unfinished(store):
    fill(store, 3)
    store.close()
    assert list((root_of(store) / "tmp").iterdir()) == []


@pytest.fixture
def dead(tmp_path):
    """Leaves files as a writer does that is killed."""
    dead = tmp_path / "pool" / "tmp" / f"999-{0:016x}"
    dead.mkdir(parents=True)
    (dead / "0").write_bytes(b"half")
    return dead


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(dead):
    living = Scratch(dead.parent)
    mine = Path(living.name())
    mine.write_bytes(b"half")
    sweep(dead.parent)
    assert not dead.exists()
    assert mine.exists()
    mine.unlink()
    living.close()
    assert list(dead.parent.iterdir()) == []


def test_a_sweep_deletes_nothing_that_lies_behind_a_link(tmp_path):
    """Neither where the pool's tmp is a link, nor where an entry of it is one."""
    others, tmp = tmp_path / "others", tmp_path / "tmp"
    (others / f"1-{1:016x}").mkdir(parents=True)
    (others / f"1-{1:016x}" / "precious").touch()
    tmp.mkdir()
    (tmp / f"2-{2:016x}").symlink_to(others / f"1-{1:016x}")
    (tmp_path / "link").symlink_to(others)
    sweep(tmp)
    sweep(tmp_path / "link")
    assert [path.name for path in (others / f"1-{1:016x}").iterdir()] == ["precious"]


def test_a_sweep_leaves_what_no_writer_made(dead):
    (dead.parent / "job").mkdir()
    (dead.parent / "job" / "precious").touch()
    (dead / "directory").mkdir()
    sweep(dead.parent)
    assert (dead.parent / "job" / "precious").exists()
    assert [path.name for path in dead.iterdir()] == ["directory"]


def test_a_pool_whose_tmp_is_a_link_is_refused(store, tmp_path):
    store.close()
    (root_of(store) / "tmp").rmdir()
    (root_of(store) / "tmp").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="tmp is a link or a file: make it a directory"):
        FileStore(root_of(store))


def test_a_sweep_leaves_a_directory_whose_maker_moves_in_again(tmp_path, monkeypatch):
    directory = PoolDirectory(tmp_path / "pool")
    scratch = tmp_path / "pool" / "tmp" / f"1-{1:016x}"
    scratch.mkdir()
    (scratch / "lock").touch()
    unlink = os.unlink

    def unlink_and_make(path, **options):
        unlink(path, **options)
        if path == "lock":
            (scratch / "lock").touch()

    monkeypatch.setattr(os, "unlink", unlink_and_make)
    directory.sweep()
    assert (scratch / "lock").exists()
    directory.close()


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, monkeypatch):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")  # as an NFS mount without them has it

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"no flock .* mount it with locks, or name a directory"):
        FileStore(tmp_path / "pool")
