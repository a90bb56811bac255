"""An arena's file: made whole, this user's alone, and never followed or believed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from types import SimpleNamespace

import pytest

from pdstore.errors import ConfigError, StoreDenied, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.store.arena.file import open_arena_file
from pdstore.store.arena.store import ArenaStore
from pdstore.store.connect import RoomWatch
from pdstore.store.guard import GuardedStore, problem_of
from pdstore.testing import fresh_keys
from pdstore.testing.values import put, run_together
from tests.support.fuse_mount import mounted
from tests.support.kv import eventually

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"pdstore-{os.geteuid()}-pool"


def open_and_close(library, path, size=4 * MIB):
    os.close(open_arena_file(path, library, size, None))


def test_a_new_arena_is_this_users_alone(library, path):
    old = os.umask(0)
    try:
        open_and_close(library, path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_processes_that_make_it_at_once_get_the_same(library, path):
    run_together(*[lambda: open_and_close(library, path)] * 8, deadline_s=20)
    assert os.listdir(path.parent) == [path.name]


def test_a_link_is_not_followed(library, path, tmp_path):
    (tmp_path / "other").write_bytes(b"x")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(StoreUnavailable):
        open_and_close(library, path)
    assert (tmp_path / "other").read_bytes() == b"x"


def test_a_file_that_others_may_open_is_refused(library, path):
    open_and_close(library, path)
    path.chmod(0o640)
    with pytest.raises(StoreDenied, match="chmod 600"):
        open_and_close(library, path)


@pytest.mark.misconfiguration(
    "the file of a `shm://` arena removed while engines run: by hand, or by systemd-logind at a "
    "logout",
)
def test_an_instance_whose_arena_was_removed_says_so(library, path, closed_after, caplog):
    """By RemoveIPC of systemd-logind, or by hand: its own calls go on, so nothing else shows it."""
    old = closed_after(ArenaStore(library, directory=path.parent, size=4 * MIB))
    guard, keys = GuardedStore(old, Metrics()), fresh_keys(1)
    closed_after(RoomWatch(guard, Metrics(), interval_s=0.001))
    put(guard, keys, [b"x"])
    assert (old.room().problem, problem_of(guard)) == (None, None)
    path.unlink()
    eventually(lambda: "was removed while this instance ran" in (problem_of(guard) or ""))
    assert guard.match(keys) == 1, "with whoever has the old file hand-offs go on"
    new = closed_after(ArenaStore(library, directory=path.parent, size=4 * MIB))
    eventually(lambda: "another file has its place" in (problem_of(guard) or ""))
    assert (new.room().problem, new.match(keys)) == (None, 0)
    said = [text for text in caplog.messages if "restart this one" in text]
    assert len(said) == len(set(said)) == 2, "each is logged once"
    assert all("RemoveIPC=no" in text for text in said)


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(8 * MIB), os.urandom(MIB)], ids=len)
def test_a_file_that_is_no_arena_is_refused_and_left_alone(library, path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(StoreUnavailable, match="no arena"):
        ArenaStore(library, directory=path.parent)
    assert path.read_bytes() == data


def test_an_arena_of_another_version_is_refused(library, path):
    open_and_close(library, path)
    with path.open("r+b") as file:
        file.seek(8)  # behind the magic number
        assert file.read(4) == (3).to_bytes(4, "little")
        file.seek(8)
        file.write((1).to_bytes(4, "little"))
    with pytest.raises(StoreUnavailable, match="no arena of this version"):
        ArenaStore(library, directory=path.parent)


@pytest.mark.parametrize(
    ("size", "slab"),
    [
        *((100 * MIB, 1000), (8 << 30, 8 << 30), (MIB, 2 * MIB)),
        *((1024 * MIB, 4096), (16 << 40, 128 * MIB)),
    ],
)
def test_sizes_that_no_arena_has_are_refused(library, path, monkeypatch, size, slab):
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=1 << 38, f_blocks=1 << 38, f_frsize=4096),
    )
    with pytest.raises(ConfigError, match=r"no arena has .* or leave .slab= out"):
        open_arena_file(path, library, size, slab)
    assert os.listdir(path.parent) == []


@pytest.mark.misconfiguration("`?size=` of an arena without its unit, as `?size=64`")
@pytest.mark.parametrize("size", [1, 64, 65_535])
def test_a_size_without_its_unit_is_told_with_one(library, path, size):
    with pytest.raises(ConfigError, match=r"\?size=.* is less than .*: write a .* \?size=64GiB"):
        open_arena_file(path, library, size, None)
    assert os.listdir(path.parent) == []


@pytest.mark.misconfiguration("`shm://` in a `/dev/shm` that is full")
@pytest.mark.misconfiguration("`shm://` on FUSE, ext3, ramfs, or a hugetlbfs without `size=`")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize(
    ("kind", "options", "size", "words"),
    [
        ("ramfs", "mode=700", None, "does not tell its free space: write a ?size="),
        ("ramfs", "mode=700", MIB, "is on ramfs, which does not make"),
        ("hugetlbfs", "mode=700", None, "does not tell its free space: write a ?size="),
        ("tmpfs", "mode=700,size=64k", None, "is full, 64.0KiB are free: delete files there"),
    ],
)
def test_a_file_system_that_holds_no_arena_is_told(library, tmp_path, kind, options, size, words):
    mount = ["mount", "-t", kind, "-o", options, kind, str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip(f"this kernel or this container mounts no {kind}")
    try:
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            open_arena_file(tmp_path / "arena", library, size, None)
        assert str(tmp_path) in str(caught.value)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.misconfiguration("`shm://` on FUSE, ext3, ramfs, or a hugetlbfs without `size=`")
def test_fuse_holds_no_arena(library, tmp_path):
    words = "is on fuse, which does not make files without a name (O_TMPFILE): name a directory in"
    with mounted(tmp_path) as disk, pytest.raises(ConfigError, match=re.escape(words)):
        open_arena_file(disk.at / "arena", library, MIB, None)
