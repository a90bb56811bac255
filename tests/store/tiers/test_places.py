"""Where the tiers of a pool should not lie: told at the start, by sentences that name the tiers."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.connect import check_url, place_of
from pdstore.store.file.mount import Mount
from pdstore.store.tiers.places import place_doubts
from pdstore.store.url import StoreURL


@pytest.fixture
def doubts(tmp_path):
    """The doubts about URLs, in which {0} and {1} are directories on these file systems."""

    def doubts(urls, *kinds):
        folders = [tmp_path / name for name in ("zero", "one")]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        of = dict(zip(folders, kinds, strict=False))
        text = urls.format(*folders, tmp=tmp_path)

        def mount(path):
            kind = next((kind for folder, kind in of.items() if path.is_relative_to(folder)), "")
            return Mount(kind, frozenset())

        return {
            doubt.subject: doubt
            for doubt in place_doubts(StoreURL.of(text), read_settings(), mount)
        }

    return doubts


@pytest.mark.parametrize("first", ["redis://there", "mooncake://there:50051", "file://{1}/nfs"])
@pytest.mark.misconfiguration("a disk of each host below a first tier that hosts share")
def test_a_hosts_own_directory_below_a_first_tier_of_many_hosts_is_told(doubts, first):
    doubt = doubts(f"{first} file://{{0}}/pool?copy=1GB/s", "ext4", "nfs4")["own directory"]
    assert "zero/pool is a directory of this host alone (ext4)" in doubt.said
    assert "a purge on one leaves" in doubt.said
    assert "shm://" in doubt.remedy
    assert not doubt.is_wrong


@pytest.mark.parametrize(
    ("urls", "kind"),
    [
        ("redis://there file://{0}/pool", "nfs4"),
        ("redis://there file://{0}/pool", "a cluster's file system"),
        ("redis://127.0.0.1:6379 file://{0}/pool", "ext4"),
        ("redis://[::1] file://{0}/pool", "ext4"),
        ("redis+unix:///run/redis.sock file://{0}/pool", "ext4"),
        ("shm://pool file://{0}/pool", "ext4"),
        ("memory://pool file://{0}/pool", "ext4"),
        ("shm://pool redis://there", "ext4"),
    ],
)
def test_a_directory_that_all_instances_have_is_right(doubts, urls, kind):
    assert not doubts(urls, kind)


def test_two_tiers_on_one_file_system_are_told(doubts):
    two = doubts("file://{0}/a file://{1}/b", "ext4", "ext4")
    assert set(two) == {"one disk"}
    assert "zero/a and " in two["one disk"].said
    assert "share its room and its speed" in two["one disk"].said


def test_files_in_memory_below_another_tier_are_told(doubts):
    assert "in memory" in doubts("redis://127.0.0.1 file://{0}/a", "tmpfs")
    assert not doubts("memory://a shm://b?dir={0}&size=8MiB", "tmpfs"), "an arena is meant to be"
    assert not doubts("memory://a faulty+shm://b?dir={0}&size=8MiB&seed=7", "tmpfs")
    assert "in memory" in doubts("memory://a faulty+file://{0}/a?seed=7", "tmpfs")


def test_a_tier_that_fails_on_purpose_is_where_the_store_in_it_is(tmp_path):
    arena = f"faulty+shm://b?dir={tmp_path}&size=8MiB&seed=7"
    with pytest.raises(ConfigError, match="is for the processes of one host"):
        check_url(f"redis://there {arena}", read_settings())
    check_url(f"{arena} redis://there", read_settings())
    of_arena = place_of(arena, read_settings())
    assert of_arena.missing_path is not None, "to open it would make it"
    trial = of_arena.trial_url
    assert trial.startswith("faulty+shm://trial-")
    assert trial.endswith(f"?dir={tmp_path}&size=8MiB&seed=7")


def test_the_start_tells_it(tmp_path, caplog):
    urls = f"file://{tmp_path}/above file://{tmp_path}/below?copy=1GB/s"
    with contextlib.closing(open_store(urls, read_settings())):
        pass
    [line] = [each for each in caplog.records if "one file system" in each.getMessage()]
    assert line.levelname == "WARNING"
    assert "leave one of the tiers away" in line.getMessage()
