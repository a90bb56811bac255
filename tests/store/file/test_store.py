"""FileStore beyond the contract: links, names, URLs, and the system's errors as the store's."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import subprocess
from collections import deque
from functools import partial

import pytest
from inotify_simple import INotify

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.native.library import load_library
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file.files import OTHER_LENGTH, error_of, named_error
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import empty_slots, get, put
from tests.support.file_pool import SIZE, FileStoreTests, fill, num_temporaries, path_of, planted_at
from tests.support.kv import settings_of
from tests.support.random_calls import play_random_calls


class TestFileStore(FileStoreTests):
    @pytest.fixture(params=["off", "require"])
    def open_at(self, tmp_path, request, closed_after):
        """Opens a store at a directory's name and a budget, with the native library or without."""
        library = partial(load_library, settings_of(native=request.param), for_gpu=False)
        return lambda name, budget=None: closed_after(
            FileStore(tmp_path / name, budget=budget, built=library)
        )


def test_which_stored_answers_for_each_key_and_leases_none(store):
    keys = fill(store, 3, age_s=50.0)
    before = [path_of(store, key).stat().st_mtime_ns for key in keys]
    asked = [keys[2], *fresh_keys(2), keys[0]]
    assert store.which_stored(asked) == [True, False, False, True]
    assert store.which_stored([]) == []
    assert [path_of(store, key).stat().st_mtime_ns for key in keys] == before


@pytest.mark.parametrize(
    ("refuses", "why", "sysctl"),
    [
        ("__init__", errno.EMFILE, "fs.inotify.max_user_instances"),
        ("add_watch", errno.ENOSPC, "fs.inotify.max_user_watches"),
    ],
)
def test_a_user_who_may_watch_no_more_folders_is_told_what_to_raise(
    store, monkeypatch, caplog, refuses, why, sysctl
):
    def refused(*_):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(INotify, refuses, refused)
    with pytest.raises(StoreUnavailable):  # and not StoreFull: it is not the disk
        store.wait_for_change(None, 0.1)
    assert "may watch no more folders" in caplog.text
    assert sysctl in caplog.text


def test_random_calls_agree_with_a_dict(tmp_path):
    play_random_calls(lambda: FileStore(tmp_path / "pool"))


def test_a_symbolic_link_is_not_followed(store, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 64)
    [key] = fresh_keys(1)
    planted_at(store, key).symlink_to(secret)
    slots = empty_slots([64])
    with pytest.raises(WrongLength):
        store.get([key], slots)
    assert b"s" not in bytes(slots.view)
    put(store, [key], [b"new" * 20])
    store.remove([key])
    assert secret.read_bytes() == b"s" * 64


def test_a_fifo_does_not_hang_a_reader(store):
    [key] = fresh_keys(1)
    os.mkfifo(planted_at(store, key))
    with pytest.raises(WrongLength):
        get(store, [key], [64])


def test_a_directory_in_a_values_place_is_corrupt_and_heals(store):
    keys = fresh_keys(2)
    places = [planted_at(store, key) for key in keys]
    for place in places:
        place.mkdir()
    (places[1] / "somebodys").touch()
    with pytest.raises(WrongLength):
        get(store, keys, [SIZE] * 2)
    store.remove(keys)
    assert store.match(keys) == 0
    put(store, keys[:1], [content(keys[0], SIZE)])
    assert len(get(store, keys[:1], [SIZE])) == 1
    store.clear(keys[0].split(":")[1])
    assert [place.exists() for place in places] == [False, True]


def test_the_log_says_that_p_and_d_must_share_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        FileStore(tmp_path / "pool", budget=1 << 30).close()
    [record] = caplog.records
    assert str(tmp_path / "pool") in record.message
    assert "1.0GiB" in record.message
    assert "P and D must use the same directory" in record.message


def test_file_without_a_path_is_a_directory_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.closing(open_store("file://", Settings())) as store:
        assert store.label == f"file://{tmp_path}/pdstore/pool"


@pytest.mark.misconfiguration("the home directory cannot be written")
def test_a_home_that_cannot_be_written_is_told_with_what_to_name(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    words = "/proc/none/.cache/pdstore/pool: .*: name a directory that this user may write to"
    with pytest.raises(StoreError, match=words):
        open_store("file://", Settings())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://pool", "write file:///an/absolute/directory"),
        ("file:///", "write file:///an/absolute/directory"),
        ("file:///x?budget=much", "write one like 20GiB"),
        ("file:///x?lease=7200", "at most 3600"),
        ("file:///x?lease=-1", "positive"),
        ("file:///x?bugdet=1GiB", "unknown option 'bugdet'; known: budget, lease, direct"),
    ],
)
def test_a_bad_url_says_what_to_write(url, words):
    with pytest.raises(ConfigError, match=words):
        open_store(url, Settings())


def test_a_clear_leaves_values_that_are_being_written(store, monkeypatch):
    keys, link = fresh_keys(1), os.link

    def link_after_a_clear(*args):
        store.clear(keys[0].split(":")[1])
        link(*args)

    monkeypatch.setattr(os, "link", link_after_a_clear)
    assert put(store, keys, [b"x" * 64]) == 1
    assert get(store, keys, [64]) == [b"x" * 64]
    assert num_temporaries(store) == 0


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.ETIMEDOUT, StoreTimeout),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.EISDIR, WrongLength),
        (errno.ELOOP, WrongLength),
        (OTHER_LENGTH, WrongLength),
    ],
)
def test_an_errno_is_the_error_that_says_what_to_do(why, kind):
    error = error_of("file:///pool", why, "key", 3)
    assert type(error) is kind
    assert error.num_done == 3
    assert str(error).startswith("file:///pool: ")
    assert ": key" in str(error)


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (errno.EACCES, "the owner and the mode of its directory"),
        (errno.EROFS, "mount it so that this instance may write"),
        (errno.ENOSPC, "free some of its disk"),
        (errno.EIO, "look at its file system"),
        (errno.ENOTCONN, "look at its file system"),
    ],
)
def test_an_error_of_files_says_what_to_look_at_and_no_server(why, remedy):
    assert remedy in error_of("file:///pool", why, "key").remedy


def test_a_pool_full_of_leases_says_what_to_change(store):
    store.match(fill(store, 18))
    with pytest.raises(StoreFull, match=r"all is leased: .*; raise \?budget=, or shorten \?lease="):
        fill(store, 20)


def test_a_doubt_is_logged_once_though_both_halves_of_an_instance_open_the_store(tmp_path, caplog):
    for _ in range(2):
        FileStore(tmp_path / "pool", budget=1 << 50).close()
    assert caplog.text.count("and its file system has") == 1


@pytest.mark.misconfiguration("the file system has no inodes left")
def test_a_file_system_without_inodes_says_so_and_not_that_it_is_full(full_disk):
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", full_disk], check=True)
    with pytest.raises(StoreFull) as caught, named_error(f"file://{full_disk}", "key"):
        deque((full_disk / str(n)).touch() for n in range(9))
    assert str(caught.value).startswith(f"file://{full_disk}: no inodes are left: key")
    assert caught.value.remedy == "delete files, or make the file system with more"


def test_a_limit_of_a_files_size_is_named_and_is_no_store_that_is_down(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = pytest.raises(StoreFull, match="a file may have 4096 bytes: raise ulimit -f")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with full, named_error(f"file://{tmp_path}", "key"):
            (tmp_path / "key").write_bytes(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
