"""FileStore keeps the contract; eviction, faults of the disk, rights, and what lies on disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.block import checksum
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.native.library import load_library
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.file.directory import PoolDirectory, try_lock
from pdstore.store.file.eviction import default_budget
from pdstore.store.file.store import FileStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.state_machine import play_random_calls
from pdstore.testing.values import empty_slots, get, put
from tests.support.kv import settings_of

SIZE = 64 << 10


class TestFileStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "pool")) as store:
            yield store

    @pytest.fixture
    def peer(self, store, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "pool")) as peer:
            yield peer

    @pytest.fixture
    def small_store(self, tmp_path):
        with contextlib.closing(FileStore(tmp_path / "small", budget=24 * SIZE)) as store:
            yield store

    def write_raw(self, store, key, data):
        planted_at(store, key).write_bytes(data)


class Summing(WrapperStore):
    """Its `get` is `get_with_checksums` where values are long enough, with the sums checked."""

    def get(self, keys, slots):
        if min(slots.sizes, default=64) < 64:
            return super().get(keys, slots)
        n, sums = 0, [0] * len(keys)
        try:
            n = self._store.get_with_checksums(keys, slots, sums)
        except StoreError as error:
            n = error.num_done
            raise
        finally:
            assert sums[:n] == [checksum(slots.value(i)) for i in range(n)]
        return n


@pytest.mark.parametrize("native", ["off", "require"])
class TestFileStoreThatSums(TestFileStore):
    @pytest.fixture
    def open_at(self, tmp_path, native):
        """Opens a store at a directory's name and a budget."""
        library = partial(load_library, settings_of(native=native), for_gpu=False)
        with contextlib.ExitStack() as stack:

            def open_at(name, budget=None):
                store = FileStore(tmp_path / name, budget=budget, library=library)
                return stack.enter_context(contextlib.closing(Summing(store)))

            yield open_at

    @pytest.fixture
    def store(self, open_at):
        return open_at("pool")

    @pytest.fixture
    def peer(self, open_at, store):
        return open_at("pool")

    @pytest.fixture
    def small_store(self, open_at):
        return open_at("small", 24 * SIZE)

    def write_raw(self, store, key, data):
        super().write_raw(store.wrapped, key, data)


@pytest.fixture
def store(tmp_path):
    """Room for 20 values of 64 KiB."""
    with contextlib.closing(FileStore(tmp_path / "pool", budget=20 * SIZE)) as store:
        yield store


def path_of(store, key) -> Path:
    return Path(store._directory.path(key))


def planted_at(store, key) -> Path:
    path_of(store, key).parent.mkdir(mode=0o700, exist_ok=True)
    return path_of(store, key)


def fill(store, count, *, age_s=0.0):
    """Puts values that were last used `age_s` ago."""
    keys = fresh_keys(count)
    for key in keys:
        assert put(store, [key], [content(key, SIZE)]) == 1
        age(store, key, age_s)
    return keys


def age(store, key, seconds):
    used_at = time.time() - seconds
    os.utime(path_of(store, key), (used_at, used_at))


def stored(store, keys):
    return [key for key in keys if path_of(store, key).exists()]


def num_temporaries(store):
    return len([p for p in (store._directory.root / "tmp").glob("*/*") if p.name != "lock"])


def test_random_calls_agree_with_a_dict(tmp_path):
    play_random_calls(lambda: FileStore(tmp_path / "pool"))


# -- eviction


def test_the_least_recently_used_values_go_first(store):
    old, middle = fill(store, 4, age_s=300), fill(store, 4, age_s=200)
    young = fill(store, 4, age_s=100)
    fill(store, 10)
    assert 0 <= len(stored(store, old)) < 4
    assert stored(store, middle) == middle
    fill(store, 3)
    assert stored(store, old) == []
    assert stored(store, young) == young


def test_a_match_counts_as_use_and_leases(store):
    keys = fill(store, 16, age_s=300)
    assert store.match(keys[:4]) == 4
    fill(store, 10, age_s=100)
    assert stored(store, keys)[:4] == keys[:4]
    assert len(stored(store, keys)) < 16
    assert time.time() < path_of(store, keys[0]).stat().st_mtime <= time.time() + store.lease_s


def test_a_lease_ends(store):
    keys = fill(store, 16)
    store.match(keys)
    for key in keys:
        age(store, key, 2.0)  # as if its lease had ended two seconds ago
    fill(store, 16)
    assert len(stored(store, keys)) <= 4


def test_a_value_is_kept_for_a_moment_after_its_put(store):
    keys = fresh_keys(30)
    with pytest.raises(StoreFull) as caught:
        put(store, keys, [content(key, SIZE) for key in keys])
    assert stored(store, keys) == keys[: caught.value.num_done]
    assert 16 <= caught.value.num_done <= 20


def test_no_room_for_a_value_evicts_nothing_for_it(store):
    keys = fill(store, 10, age_s=100)
    with pytest.raises(StoreFull):
        put(store, fresh_keys(1), [b"x" * (21 * SIZE)])
    assert stored(store, keys) == keys


def test_a_time_far_in_the_future_is_no_lease(store):
    keys, old = fill(store, 8, age_s=-86_400), fill(store, 8, age_s=300)
    fill(store, 12)
    assert stored(store, keys) == []
    assert len(stored(store, old)) > 4


def test_tails_and_markers_past_their_time_go_before_any_block(store):
    block = fresh_keys(1)[0]
    old = [BlockKey(f"{block}:partial:3"), BlockKey("pds1:00:handoff:11:0:done")]
    young = [BlockKey(f"{block}:partial:4"), BlockKey("pds1:00:handoff:12:0:done")]
    for keys, age_s in ((old, 601.0), (young, 599.0), ([block], 10_000.0)):
        put(store, keys, [content(key, 64) for key in keys])
        for key in keys:
            age(store, key, age_s)
    fill(store, 2)
    assert stored(store, [*old, *young, block]) == [*young, block]


def test_the_pools_id_is_never_evicted(store):
    put(store, [POOL_ID_KEY], [b"x" * 64])
    age(store, POOL_ID_KEY, 1e6)
    fill(store, 40, age_s=100)
    assert store.match([POOL_ID_KEY]) == 1


def test_the_budget_holds_over_many_puts(store):
    for _ in range(10):
        fill(store, 16, age_s=50)
        num_bytes = sum(file.size for file in store._directory.files())
        assert num_bytes <= 20 * SIZE


def test_a_second_store_counts_what_is_there(store, tmp_path):
    keys = fill(store, 16, age_s=50)
    with contextlib.closing(FileStore(tmp_path / "pool", budget=20 * SIZE)) as other:
        fill(other, 10)
    assert len(stored(store, keys)) <= 10


def test_puts_go_on_while_another_process_evicts(store):
    fill(store, 18, age_s=100)
    lock = store._directory.lock()
    assert lock is not None
    fill(store, 2)
    with pytest.raises(StoreFull):
        fill(store, 8)
    os.close(lock)
    fill(store, 8)


def test_a_store_that_is_full_of_leases_takes_values_when_they_end(store):
    keys = fill(store, 18)
    store.match(keys)
    with pytest.raises(StoreFull):
        fill(store, 20)
    for key in keys:
        age(store, key, 10)
    store._evictor._full_until = 0.0
    fill(store, 10)


def test_the_default_budget_counts_what_the_pool_has_already(tmp_path):
    directory = PoolDirectory(tmp_path / "pool")
    free = shutil.disk_usage(tmp_path).free
    assert default_budget(directory) == pytest.approx(min(20 << 30, free / 2), rel=0.2)
    directory.close()


# -- what lies on disk


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


def test_keys_spread_over_256_directories(tmp_path):
    keys = fresh_keys(2000)
    with contextlib.closing(FileStore(tmp_path / "pool")) as store:
        put(store, keys, [b"x"] * 2000)
    counts = [len(list(place.iterdir())) for place in store._directory.root.glob("??")]
    assert len(counts) == 256
    assert max(counts) < 40


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


def test_a_deleted_value_is_a_miss(store):
    keys = fill(store, 3)
    path_of(store, keys[1]).unlink()
    assert store.match(keys) == 1
    assert len(get(store, keys, [SIZE] * 3)) == 1


@pytest.mark.parametrize("what", ["tmp", "??", "*"])
def test_a_store_survives_the_deletion_of_its_directories(store, what):
    keys = fill(store, 3)
    for path in store._directory.root.glob(what):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert store.match(keys) == (3 if what == "tmp" else 0)
    assert len(fill(store, 8)) == 8


def test_a_closed_store_leaves_nothing_unfinished(store):
    fill(store, 3)
    store.close()
    assert list((store._directory.root / "tmp").iterdir()) == []


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(store, tmp_path):
    scratch = store._directory.root / "tmp"
    (scratch / "999-dead").mkdir()
    (scratch / "999-dead" / "0").write_bytes(b"half")
    mine = Path(store._directory.temporary())
    mine.write_bytes(b"half")
    FileStore(tmp_path / "pool", budget=20 * SIZE).close()
    assert not (scratch / "999-dead").exists()
    assert mine.exists()
    mine.unlink()


def test_a_lock_is_one_users_at_a_time(tmp_path):
    first = try_lock(f"{tmp_path}/lock")
    assert first is not None
    assert try_lock(f"{tmp_path}/lock") is None
    os.close(first)
    again = try_lock(f"{tmp_path}/lock")
    assert again is not None
    os.close(again)


def test_the_log_says_that_p_and_d_must_share_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        FileStore(tmp_path / "pool", budget=1 << 30).close()
    [record] = caplog.records
    assert str(tmp_path / "pool") in record.message
    assert "1.0GiB" in record.message
    assert "P and D must use the same directory" in record.message


# -- faults


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.EIO, StoreUnavailable),
        (errno.EMFILE, StoreUnavailable),
    ],
)
@pytest.mark.parametrize("verb", ["match", "get", "put", "remove"])
def test_an_error_of_the_system_says_where_and_counts(store, monkeypatch, number, kind, verb):
    keys = fill(store, 3)
    path, new = store._directory.path(keys[1]), BlockKey(f"{keys[1]}:partial:1")
    call = {"match": "utime", "get": "open", "put": "link", "remove": "unlink"}[verb]
    if verb == "put":
        path = store._directory.path(new)
    real = getattr(os, call)

    def failing(*args, **kwargs):
        if path in args:
            raise OSError(number, os.strerror(number), path)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    calls = {
        "match": lambda: store.match(keys),
        "get": lambda: get(store, keys, [SIZE] * 3),
        "put": lambda: put(store, [keys[0], new, keys[2]], [b"x" * 64] * 3),
        "remove": lambda: store.remove(keys),
    }
    with pytest.raises(kind, match=re.escape(f"{store.label}: {os.strerror(number)}")) as caught:
        calls[verb]()
    assert caught.value.num_done == 1
    assert isinstance(caught.value.__cause__, OSError)
    assert num_temporaries(store) == 0


def test_a_write_that_fails_half_way_leaves_nothing(store, monkeypatch):
    real, keys = os.write, fresh_keys(2)

    def half(fd, data):
        if len(data) == SIZE:
            return real(fd, data[: SIZE // 2])
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StoreUnavailable):
        put(store, keys, [content(key, SIZE) for key in keys])
    monkeypatch.undo()
    assert store.match(keys[:1]) == 0
    assert num_temporaries(store) == 0
    assert put(store, keys, [content(key, SIZE) for key in keys]) == 2


def test_a_full_disk_is_evicted_once_and_put_again(store, monkeypatch):
    old = fill(store, 10, age_s=100)
    real, failed = os.write, []

    def full_once(fd, data):
        if not failed:
            failed.append(fd)
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full_once)
    [key] = fill(store, 1)
    assert get(store, [key], [SIZE]) == [content(key, SIZE)]
    assert len(stored(store, old)) < 10


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_file_system_is_store_full_and_leaves_nothing_half_written(full_disk):
    with contextlib.closing(FileStore(full_disk / "pool", budget=1 << 30)) as store:
        keys = fresh_keys(100)
        with pytest.raises(StoreFull) as caught:
            put(store, keys, [content(key, SIZE) for key in keys])
        done = caught.value.num_done
        assert 40 < done <= 64
        assert store.match(keys) == done
        assert get(store, keys, [SIZE] * 100) == [content(key, SIZE) for key in keys[:done]]
        assert num_temporaries(store) == 0


def test_a_full_file_system_makes_room_when_nothing_is_leased(full_disk):
    with contextlib.closing(FileStore(full_disk / "pool", budget=1 << 30)) as store:
        for _ in range(5):
            fill(store, 40, age_s=100)


def test_half_of_a_small_file_system_is_the_default_budget(full_disk):
    with contextlib.closing(FileStore(full_disk / "pool")) as store:
        fill(store, 20)
        assert 1.5 * 2**20 < store._evictor.budget <= 2 * 2**20
        before = store._evictor.budget
    with contextlib.closing(FileStore(full_disk / "pool")) as store:
        assert store._evictor.budget == pytest.approx(before, rel=0.01)


# -- directories that cannot be a pool


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_without_permission_is_denied_and_the_message_helps(tmp_path):
    for path in [tmp_path, *tmp_path.parents][:3]:
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


def test_a_directory_that_others_can_write_to_is_denied(tmp_path):
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool").chmod(0o777)
    with pytest.raises(StoreDenied, match="chmod 700"):
        FileStore(tmp_path / "pool")


def test_a_file_is_no_pool(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "pool"):
        with pytest.raises(ConfigError, match="is not a directory"):
            FileStore(path)


def test_a_directory_with_other_files_is_no_pool(tmp_path):
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        FileStore(tmp_path)
    assert (tmp_path / "00" / "precious").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["00"]


def test_an_empty_file_systems_directory_is_a_pool(tmp_path):
    (tmp_path / "lost+found").mkdir()
    FileStore(tmp_path).close()


def test_a_pool_may_be_opened_through_a_symbolic_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").mkdir()
    FileStore(tmp_path / "link").close()


def test_file_without_a_path_is_a_directory_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.closing(open_store("file://", Settings())) as store:
        assert store.label == f"file://{tmp_path}/pdstore/pool"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://pool", "write file:///an/absolute/directory"),
        ("file:///", "write file:///an/absolute/directory"),
        ("file:///x?budget=much", "write one like 20GiB"),
        ("file:///x?lease=7200", "at most 3600"),
        ("file:///x?lease=-1", "positive"),
        ("file:///x?bugdet=1GiB", "unknown option 'bugdet'; known: budget, lease"),
    ],
)
def test_a_bad_url_says_what_to_write(url, words):
    with pytest.raises(ConfigError, match=words):
        open_store(url, Settings())


def test_a_store_error_is_not_mapped_twice(store, monkeypatch):
    def full(_size):
        raise StoreError("mine")

    monkeypatch.setattr(store._evictor, "admit", full)
    with pytest.raises(StoreError, match=r"^mine$"):
        put(store, fresh_keys(1), [b"x"])


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


def test_a_clear_goes_on_when_another_one_deletes_first(store, monkeypatch):
    keys, unlink = fill(store, 10), os.unlink

    def unlink_twice(path):
        unlink(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_twice)
    store.clear(keys[0].split(":")[1])
    assert stored(store, keys) == []


def test_a_clear_that_the_system_refuses_says_where(store, monkeypatch):
    keys = fill(store, 1)

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refused)
        with pytest.raises(StoreDenied, match=f"clear of {keys[0].rpartition(':0:0:')[0]}"):
            store.clear(keys[0].split(":")[1])
    assert stored(store, keys) == keys


def test_a_clear_leaves_values_that_are_being_written(store, monkeypatch):
    keys, link = fresh_keys(1), os.link

    def link_after_a_clear(*args):
        store.clear(keys[0].split(":")[1])
        link(*args)

    monkeypatch.setattr(os, "link", link_after_a_clear)
    assert put(store, keys, [b"x" * 64]) == 1
    assert get(store, keys, [64]) == [b"x" * 64]
    assert num_temporaries(store) == 0


def test_a_sweep_leaves_a_directory_whose_maker_moves_in_again(tmp_path, monkeypatch):
    directory = PoolDirectory(tmp_path / "pool")
    scratch = tmp_path / "pool" / "tmp" / "1-new"
    scratch.mkdir()
    (scratch / "lock").touch()
    unlink = os.unlink

    def unlink_and_make(path):
        unlink(path)
        if str(path).startswith(str(scratch)):
            (scratch / "lock").touch()

    monkeypatch.setattr(os, "unlink", unlink_and_make)
    directory.sweep()
    assert (scratch / "lock").exists()
    directory.close()
