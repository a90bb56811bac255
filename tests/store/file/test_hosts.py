"""Pools of several hosts: what a host's kernel keeps of names, and how the store looks past it."""

from __future__ import annotations

import contextlib
import threading

import pytest

from pdstore.cli.answer import Level
from pdstore.cli.doctor import check_store
from pdstore.settings import read_settings
from pdstore.store.connect import read_pool_id
from pdstore.store.file.mount import Mount, NameCheck, mount_of
from pdstore.store.file.store import FileStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put
from tests.support.file_pool import SIZE, fill
from tests.support.fuse_mount import mounted
from tests.support.kv import Instance

# NFS keeps for 30 s and more that a name is missing, if it is mounted without lookupcache=positive
REMEMBERS = {"negative_timeout": 30, "entry_timeout": 1, "attr_timeout": 1}


class Telling(FileStore):
    """Tells by a semaphore when a look for markers has ended without one."""

    looks = threading.Semaphore(0)

    def which_stored(self, keys):
        found = super().which_stored(keys)
        self.looks.release()
        return found


SLOW = {"attr_timeout": 60, "entry_timeout": 60}


@pytest.fixture
def hosts(tmp_path, built):
    """One directory as two hosts see it: P's store, and D's, whose kernel remembers misses."""
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(mounted(tmp_path / "p"))
        d = stack.enter_context(mounted(tmp_path / "d", p.behind, REMEMBERS))
        stores = [Telling(host.at / "pool", budget=1 << 30, built=built) for host in (p, d)]
        for store in stores:
            stack.callback(store.close)
        yield stores


@pytest.fixture(params=["python", "native"])
def built(request, library):
    return {"python": lambda: None, "native": lambda: library}[request.param]


def test_what_another_host_put_is_found_though_it_was_missing_before(hosts):
    p, d = hosts
    keys = fresh_keys(70)
    assert d.match(keys) == 0
    assert not any(d.which_stored(keys))
    assert get(d, keys[:1], [SIZE]) == []
    put(p, keys, [content(key, SIZE) for key in keys])
    assert d.which_stored([*keys, *fresh_keys(1)]) == [True] * 70 + [False]
    assert d.match(keys) == 70


def test_a_match_and_a_get_look_past_each_name_that_was_missing(hosts):
    p, d = hosts
    keys = fresh_keys(5)
    for key in keys:
        assert d.match([key]) == 0
    put(p, keys, [content(key, SIZE) for key in keys])
    assert d.match(keys) == 5
    for key in (more := fresh_keys(5)):
        assert get(d, [key], [SIZE]) == []
    put(p, more, [content(key, SIZE) for key in more])
    assert get(d, more, [SIZE] * 5) == [content(key, SIZE) for key in more]


def test_a_look_makes_nothing(hosts):
    p, d = hosts
    for key in (keys := fresh_keys(20)):
        d.match([key])
    assert not any(d.which_stored(keys))
    assert [value for value in p.stored_values()] == []


def test_a_d_that_looks_before_p_saves_takes_the_hand_off(hosts, closed_after):
    read_pool_id(hosts[0])
    p, d = (
        closed_after(Instance(store, role=role, handoff_wait_s=30.0))
        for store, role in zip(hosts, ("prefill", "decode"), strict=True)
    )
    tokens, blocks = range(600), range(38)
    for n in range(3):
        keys = p.cache.keys([n, *tokens])
        handoff, params = p.cache.announce(keys)
        hosts[1].looks = threading.Semaphore(0)
        look = d.cache.lookup(d.cache.keys([n, *tokens]), params)
        assert hosts[1].looks.acquire(timeout=30.0), "D has not asked for the markers"
        assert p.pool.save(keys, blocks, handoff=handoff).wait(30.0).num_tokens == 601
        found = look.wait(40.0)
        assert (found.num_tokens, found.reason) == (601, None)
        assert d.pool.load(found.keys, blocks).wait(30.0).num_tokens == 601


def test_a_lease_of_another_host_is_seen_though_the_old_time_is_kept(tmp_path, library):
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(mounted(tmp_path / "p"))
        d = stack.enter_context(mounted(tmp_path / "d", p.behind, SLOW))
        leasing, evicting = (
            stack.enter_context(
                contextlib.closing(
                    FileStore(host.at / "pool", budget=20 * SIZE, built=lambda: library)
                )
            )
            for host in (p, d)
        )
        keys = fill(evicting, 12, age_s=300)
        assert evicting.room().used_bytes >= 12 * SIZE, "its kernel keeps the times"
        assert leasing.match(keys) == 12
        fill(evicting, 16, age_s=100)
        assert {path.name for path in p.behind.glob("pool/??/*")} >= set(keys)


def mounts_with(kind, options, point="/mnt/pool"):
    return (
        "20 1 0:1 / / rw - ext4 /dev/sda rw\n"
        f"30 20 0:2 / {point} rw,relatime shared:1 - {kind} server:/x {options}\n"
    )


@pytest.mark.parametrize(
    ("kind", "options", "remembers", "is_told"),
    [
        ("nfs4", "rw,vers=4.2,acdirmin=30", True, True),
        ("nfs", "rw,vers=3,lookupcache=pos", False, False),
        ("nfs4", "rw,lookupcache=none", False, False),
        ("fuse.sshfs", "rw,user_id=0", True, False),
        ("virtiofs", "rw", True, False),
        ("cifs", "rw", True, False),
        ("tmpfs", "rw,size=4m", False, False),
        ("ext4", "rw", False, False),
    ],
)
def test_mounts_whose_clients_remember_misses_are_known(
    tmp_path, kind, options, remembers, is_told
):
    mount = mount_of(tmp_path, mounts_with(kind, options, point=tmp_path))
    assert mount.kind == kind
    assert mount.remembers_misses is remembers
    assert bool(list(mount.doubts())) is is_told
    assert all("lookupcache=positive" in remedy for _, _, remedy in mount.doubts())


def test_a_mount_at_a_name_with_a_blank_is_found_and_the_last_of_several_counts(tmp_path):
    (tmp_path / "ä b").mkdir()
    point = str(tmp_path / "ä b").replace(" ", "\\040")
    text = mounts_with("tmpfs", "rw", point) + mounts_with("nfs4", "rw", point)
    assert mount_of(tmp_path / "ä b" / "pool", text).kind == "nfs4"
    assert mount_of(tmp_path, text).kind == "ext4"
    assert mount_of(tmp_path, "") == Mount("", frozenset())


@pytest.mark.parametrize("kind", ["nfs4", "fuse"])
def test_a_name_check_tells_what_is_there_and_makes_nothing(tmp_path, kind):
    # as on any file system: no NFS is at hand
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "key").touch()
    check = NameCheck(tmp_path, Mount(kind, frozenset()))
    for _ in range(2):
        assert check.is_there(f"{tmp_path}/00/key")
        assert not check.is_there(f"{tmp_path}/00/other")
        assert not check.is_there(f"{tmp_path}/01/key")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["00", "key"]


def test_a_pool_on_nfs_works_as_any_other(tmp_path, monkeypatch, closed_after):
    nfs = Mount("nfs4", frozenset({"rw", "vers=4.2"}))
    monkeypatch.setattr("pdstore.store.file.store.mount_of", lambda path: nfs)
    store = closed_after(FileStore(tmp_path / "pool", budget=1 << 30))
    keys = fresh_keys(70)
    put(store, keys[:60], [content(key, SIZE) for key in keys[:60]])
    assert store.match(keys) == 60
    assert store.which_stored(keys) == [True] * 60 + [False] * 10
    assert get(store, keys[55:65], [SIZE] * 10) == [content(key, SIZE) for key in keys[55:60]]


def test_a_file_system_that_is_mounted_at_its_first_use_is_seen(
    tmp_path, monkeypatch, closed_after
):
    def mount_of_automount(path):
        return Mount("nfs4" if (path / "pool.lock").exists() else "autofs", frozenset())

    monkeypatch.setattr("pdstore.store.file.store.mount_of", mount_of_automount)
    store = closed_after(FileStore(tmp_path / "pool", budget=1 << 30))
    assert "mount" in [doubt.subject for doubt in store.doubts]


@pytest.mark.misconfiguration("NFS without `lookupcache=positive`")
def test_doctor_and_the_start_say_how_to_mount_nfs(tmp_path, monkeypatch, caplog):
    nfs = Mount("nfs4", frozenset({"rw", "vers=4.2"}))
    monkeypatch.setattr("pdstore.store.file.store.mount_of", lambda path: nfs)
    settings = read_settings(store=f"file://{tmp_path}/pool?budget=1GiB")
    findings = {f.subject: f for f in check_store(settings, None, 0)}
    mount = findings["mount"]
    assert (mount.level, mount.remedy) == (
        Level.WARN,
        "mount it with lookupcache=positive on every host",
    )
    assert findings["round trip"].level is Level.OK
    assert "nfs4 keeps for up to a minute that a name is missing: mount it with" in caplog.text
