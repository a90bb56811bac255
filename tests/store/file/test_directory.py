"""A pool's directory: who may use it, what is deleted, and what dead writers left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pdstore.errors import ConfigError, StoreDenied
from pdstore.store.connect import read_pool_id
from pdstore.store.file.store import FileStore
from pdstore.testing import fresh_keys
from pdstore.testing.values import put
from tests.support.file_pool import fill, path_of, planted_at, root_of
from tests.support.fuse_mount import mounted


def test_directories_and_files_are_the_users_own(tmp_path):
    old = os.umask(0)
    try:
        with contextlib.closing(FileStore(tmp_path / "a" / "pool")) as store:
            [key] = fill(store, 1)
            root = tmp_path / "a" / "pool"
            for path in (root, root / "tmp", path_of(store, key).parent):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert stat.S_IMODE(path_of(store, key).stat().st_mode) == 0o600
            assert stat.S_IMODE((root / "pool.lock").stat().st_mode) == 0o600
    finally:
        os.umask(old)


@pytest.mark.parametrize("what", ["tmp", "??", "*"])
def test_a_store_survives_the_deletion_of_its_directories(store, what):
    keys = fill(store, 3)
    for path in root_of(store).glob(what):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert store.match(keys) == (3 if what == "tmp" else 0)
    assert len(fill(store, 8)) == 8


def run_as_nobody(*paths: Path) -> list[str]:
    """Which errors another user gets who opens these directories."""
    code = """
import os, sys
from functools import partial
from pathlib import Path
from pdstore.errors import PDStoreError
from pdstore.store.file.store import FileStore
os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        FileStore(Path(path), budget=1 << 20).close()
        print("fine")
    except PDStoreError as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.misconfiguration("a directory that may not be written")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_without_permission_is_denied_and_the_message_helps(tmp_path):
    for path in [tmp_path, *tmp_path.parents]:
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o755)
    (tmp_path / "theirs").mkdir(mode=0o755)
    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "own", 65534, 65534)
    (tmp_path / "read-only").mkdir()
    os.chown(tmp_path / "read-only", 65534, 65534)
    (tmp_path / "read-only").chmod(0o500)
    names = ("theirs", "own", "read-only", "new")
    theirs, own, read_only, new = run_as_nobody(*[tmp_path / name for name in names])
    assert re.match(r"StoreDenied .*theirs belongs to user 0, not to 65534: chown it", theirs)
    assert own == "fine"
    assert re.match(r"StoreDenied .*read-only: Permission denied: name a directory", read_only)
    assert re.match(r"StoreDenied .*new: Permission denied: name a directory", new)


def test_a_directory_of_another_user_is_denied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(StoreDenied, match="belongs to user"):
        FileStore(tmp_path / "pool")


@pytest.mark.misconfiguration("the pool is a mount point that others may write to (`emptyDir`)")
def test_a_directory_that_others_can_write_to_is_denied(tmp_path):
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool").chmod(0o777)
    words = f"chmod 700 it, or name a folder in it, file://{tmp_path}/pool/pool"
    with pytest.raises(StoreDenied, match=words):
        FileStore(tmp_path / "pool")
    FileStore(tmp_path / "pool" / "pool").close()


@pytest.mark.misconfiguration("a directory with other files")
def test_a_directory_with_other_files_is_no_pool(tmp_path):
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"holds other files .* name an empty or a new directory"):
        FileStore(tmp_path)
    assert (tmp_path / "00" / "precious").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["00"]


def without_lock(store):
    """The pool's directory, after a program that deletes what nobody has touched for days."""
    store.close()
    (root_of(store) / "pool.lock").unlink()
    return root_of(store)


@pytest.mark.misconfiguration("a program deleted old files of the pool, `pool.lock` too")
def test_a_pool_that_lost_its_lock_file_is_still_one(store, tmp_path, closed_after):
    read_pool_id(store)
    keys = fill(store, 5)
    with contextlib.closing(FileStore(root_of(store))) as listening:
        listening.wait_for_change(None, 0.0)
        root = without_lock(store)
        (root / "tmp" / "77-0123456789abcdef-3-12").touch()
        (root / "00").mkdir(exist_ok=True)
        (root / "00" / ".nfs0000000000a1b2").touch()
        again = closed_after(FileStore(root))
        assert again.match(keys) == 5
        assert (root / "pool.lock").exists()


@pytest.mark.parametrize(
    "name", ["00/precious", "tmp/notes.txt", "bells/x", "readme", "zz/pds1:a", "00/pds1"]
)
def test_no_directory_with_one_file_of_somebody_else_is_a_pool(store, name):
    fill(store, 3)
    root = without_lock(store)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).touch()
    words = rf"holds other files \({name.removesuffix('/pds1:a')}\) and is no pool"
    with pytest.raises(ConfigError, match=words):
        FileStore(root)
    assert (root / name).exists()
    assert not (root / "pool.lock").exists()


def test_a_directory_that_has_only_tmp_or_a_link_is_no_pool(tmp_path, store):
    (tmp_path / "user" / "tmp").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds other files \(tmp\)"):
        FileStore(tmp_path / "user")
    fill(store, 1)
    root = without_lock(store)
    unused = next(n for n in range(256) if not (root / f"{n:02x}").exists())
    (root / f"{unused:02x}").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=rf"holds other files \({unused:02x}\)"):
        FileStore(root)


def test_a_clear_deletes_links_and_not_what_they_lead_to(store, tmp_path):
    keys = fresh_keys(3)
    secret, others = tmp_path / "secret", tmp_path / "others"
    secret.write_bytes(b"s" * 64)
    others.mkdir()
    (others / keys[0]).write_bytes(b"s" * 64)
    planted_at(store, keys[0]).symlink_to(secret)
    planted_at(store, keys[1]).symlink_to(others)
    planted_at(store, keys[2]).symlink_to("nothing")
    store.clear(keys[0].split(":")[1])
    assert secret.read_bytes() == (others / keys[0]).read_bytes() == b"s" * 64
    assert store.match(keys) == 0
    assert not any(os.path.lexists(path_of(store, key)) for key in keys)


def test_old_unfinished_values_are_swept_and_nothing_behind_a_link(store, tmp_path):
    tmp, precious = root_of(store) / "tmp", tmp_path / "precious"
    precious.touch()
    for name in ("1-old-0", "2-new-0"):
        (tmp / name).write_bytes(b"half")
    (tmp / "3-link").symlink_to(precious)
    for name in ("1-old-0", "3-link"):
        os.utime(tmp / name, (time.time() - 601,) * 2, follow_symlinks=False)
    FileStore(root_of(store)).close()
    assert [path.name for path in tmp.iterdir()] == ["2-new-0"]
    assert precious.exists()


def test_a_value_whose_unfinished_file_was_swept_is_written_again(store, monkeypatch):
    [key], link, swept = fresh_keys(1), os.link, []

    def link_after_a_sweep(temporary, path):
        if not swept:
            os.unlink(temporary)
        swept.append(temporary)
        link(temporary, path)

    monkeypatch.setattr(os, "link", link_after_a_sweep)
    assert put(store, [key], [b"x"]) == 1
    assert store.match([key]) == 1


def test_a_pool_whose_tmp_is_a_link_is_refused(store, tmp_path):
    store.close()
    (root_of(store) / "tmp").rmdir()
    (root_of(store) / "tmp").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="tmp is a link or a file: make it a directory"):
        FileStore(root_of(store))


@pytest.mark.misconfiguration("the pool is mounted read-only")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a tmpfs")
def test_a_read_only_mount_is_told_with_what_to_change(full_disk):
    FileStore(full_disk / "pool").close()
    subprocess.run(["mount", "-o", "remount,ro", full_disk], check=True)
    with pytest.raises(StoreDenied, match=r"Read-only file system: .*; mount it so that") as caught:
        FileStore(full_disk / "pool")
    assert "name a directory" not in str(caught.value), "which is no remedy of this"


LACKS = {
    "link": ("has no hard links", ["EPERM", "EOPNOTSUPP", "ENOSYS", "EIO"]),
    "colon": ("does not take ':' in names", ["EINVAL", "ENOENT"]),
    "utimens": ("does not set times of files", ["ENOSYS", "EPERM", "EOPNOTSUPP"]),
}


@pytest.mark.misconfiguration(
    "a file system without hard links, `:` in names or times of files, as SMB, FAT and some of "
    "FUSE",
)
@pytest.mark.parametrize(
    ("call", "why"),
    [
        pytest.param(call, why, marks=[pytest.mark.nightly] if n else [])
        for call, (_, whys) in LACKS.items()
        for n, why in enumerate(whys)
    ],
)
def test_a_file_system_that_lacks_something_is_told_at_the_start(tmp_path, call, why):
    with mounted(tmp_path, **{call: why}) as disk:
        with pytest.raises(ConfigError) as caught:
            FileStore(disk.at / "pool", budget=1 << 30)
        said = f"the file system of {disk.at}/pool {LACKS[call][0]} ("
        assert str(caught.value).startswith(said)
        assert "name a directory on another one, or use redis://" in str(caught.value)
        assert [path.name for path in (disk.behind / "pool" / "tmp").iterdir()] == []


def test_a_file_system_that_keeps_no_times_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "utime", lambda *args, **kwargs: None)
    with pytest.raises(ConfigError, match=r"does not set times of files \(a file does not keep"):
        FileStore(tmp_path / "pool")


@pytest.mark.misconfiguration("NFS without locks")
def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, monkeypatch):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")  # as an NFS mount without them has it

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"no flock .* mount it with locks, or name a directory"):
        FileStore(tmp_path / "pool")
