"""ArenaStore keeps the contract of a store, and evicts the oldest of any size."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import threading
import time
from pathlib import Path

import hypothesis
import pytest

from pdstore.errors import ConfigError, StoreFull
from pdstore.format.keys import POOL_ID_KEY, BlockKey
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.arena.store import ArenaStore
from pdstore.testing import StoreTests, content, fresh_keys
from pdstore.testing.values import empty_slots, get, put, run_together
from tests.support.random_calls import PLAY, play_random_calls

MIB = 1 << 20
SIZE = 64 << 10


class TestArenaStore(StoreTests):
    @pytest.fixture
    def store(self, open_arena):
        return open_arena(size=512 * MIB)

    @pytest.fixture
    def peer(self, store, open_arena):
        return open_arena()

    @pytest.fixture
    def small_store(self, open_arena):
        return open_arena(secrets.token_hex(4), size=3 * MIB)

    def write_raw(self, store, key, data):
        if not data:
            pytest.skip("this store holds no empty values")
        put(store, [key], [data])


def test_random_calls_agree_with_a_dict(open_arena):
    play_random_calls(lambda: open_arena(size=64 * MIB), hypothesis.settings(PLAY, max_examples=30))


def test_the_value_that_was_used_longest_ago_goes_first(open_arena):
    store, keys = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=1e-9), fresh_keys(17)
    for key in keys[:16]:
        put(store, [key], [content(key, SIZE)])
    store.match([keys[0]])
    put(store, [keys[16]], [content(keys[16], SIZE)])
    assert [store.match([key]) for key in keys] == [1, 0, *[1] * 15]


def test_a_chain_goes_from_its_end(open_arena):
    store, keys = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=1e-9), fresh_keys(20)
    put(store, keys[:16], [content(key, SIZE) for key in keys[:16]])
    assert store.match(keys[:16]) == 16
    put(store, keys[16:], [content(key, SIZE) for key in keys[16:]])
    assert store.match(keys[:16]) == 12


def test_a_use_begins_no_lease(open_arena):
    store, keys = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=600), fresh_keys(22)
    put(store, keys[:16], [content(key, SIZE) for key in keys[:16]])
    store.use([*keys[:8], keys[21]])
    put(store, keys[16:18], [content(key, SIZE) for key in keys[16:18]])
    assert store.which_stored(keys[:16]) == [*[True] * 8, *[False] * 2, *[True] * 6]
    put(store, keys[18:20], [content(key, SIZE) for key in keys[18:20]])
    store.match(keys[12:16])
    put(store, keys[20:21], [content(keys[20], SIZE)])
    assert store.which_stored(keys[:8]) == [*[True] * 7, False]


def test_the_age_of_what_goes_next_is_that_of_its_size_or_of_a_colder_slab(open_arena):
    store = open_arena(size=2 * MIB, slab_bytes=MIB, fresh_s=0, lease_s=1e-9)
    keys = fresh_keys(23)
    for key in keys[:15]:
        put(store, [key], [content(key, SIZE)])
    assert store.oldest_age_s([SIZE] * 17) is None  # a slot and a slab are free
    assert store.oldest_age_s([SIZE] * 18) is not None
    for key in keys[15:]:
        put(store, [key], [content(key, 2 * SIZE)])
    age_s = store.oldest_age_s([2 * SIZE])
    store.match(keys[:15])
    assert age_s is not None
    assert 0 <= store.oldest_age_s([2 * SIZE]) < age_s
    assert store.oldest_age_s([2 * MIB]) is None  # no slab has room for such a value


def test_a_size_that_nobody_uses_any_more_leaves_its_slabs_to_another(open_arena):
    store = open_arena(size=8 * MIB, slab_bytes=MIB, fresh_s=0, lease_s=1e-9)
    old, new = fresh_keys(128), fresh_keys(60)
    for key in old:
        put(store, [key], [content(key, SIZE)])
    for key in new:
        put(store, [key], [content(key, 2 * SIZE)])
    assert sum(store.which_stored(new)) >= 56
    assert sum(store.which_stored(old)) <= 8


def fill_with_leased_blocks(store) -> list[BlockKey]:
    stored = []
    with contextlib.suppress(StoreFull):
        while True:
            [key] = fresh_keys(1)
            put(store, [key], [content(key, SIZE)])
            stored.append(key)
    assert store.match(stored) == len(stored)
    return stored


def test_a_renewal_leases_what_nobody_has_read_since_it_was_saved(open_arena):
    """A value before the saved ones, and one read before they were saved, get a lease."""
    store = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=60)
    keys, new = fresh_keys(16), fresh_keys(9)
    put(store, keys[:12], [content(key, SIZE) for key in keys[:12]])
    get(store, keys[8:12], [SIZE] * 4)
    began = time.monotonic()
    put(store, keys[12:], [content(key, SIZE) for key in keys[12:]])
    assert store.match(keys[:8]) == 8, "a peer's match"
    get(store, keys[:8], [SIZE] * 8)
    get(store, keys[14:], [SIZE] * 2)
    assert store.renew([*keys, new[0]], 4, began) == 16
    for key in new:
        assert put(store, [key], [content(key, SIZE)]) == 1
    assert store.which_stored(keys) == [True] * 4 + [False] * 4 + [True] * 6 + [False] * 2


def test_a_peek_reads_values_and_counts_as_no_read(open_arena):
    store = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=60)
    keys, new = fresh_keys(16), fresh_keys(12)
    values = [content(key, SIZE) for key in keys]
    began = time.monotonic()
    put(store, keys, values)
    assert store.match(keys) == 16
    slots = empty_slots([SIZE] * 12)
    assert store.peek(keys[:12], slots) == 12
    assert [bytes(slots.value(i)) for i in range(12)] == values[:12]
    get(store, keys[8:], [SIZE] * 8)
    for key in new[:8]:  # in place of those whose lease a read has ended
        assert put(store, [key], [content(key, SIZE)]) == 1
    assert store.which_stored(keys) == [True] * 8 + [False] * 8
    store.remove(new)
    put(store, keys[8:], values[8:])
    get(store, keys[4:], [SIZE] * 12)
    assert store.renew(keys, 0, began) == 16
    for key in new:
        assert put(store, [key], [content(key, SIZE)]) == 1
    assert store.which_stored(keys) == [True] * 4 + [False] * 12


def test_a_renewal_lets_the_last_blocks_of_a_chain_go_first(open_arena):
    store = open_arena(size=MIB, slab_bytes=MIB, fresh_s=0, lease_s=60)
    keys, new = fresh_keys(16), fresh_keys(4)
    began = time.monotonic()
    for key in keys:  # one after the other, as a peer follows a save
        put(store, [key], [content(key, SIZE)])
        store.match([key])
        get(store, [key], [SIZE])
    assert store.renew(keys, 0, began) == 16
    put(store, new, [content(key, SIZE) for key in new])
    assert store.match(keys) == 12


def test_a_marker_takes_the_oldest_markers_place_where_all_is_kept(open_arena):
    store = open_arena(size=MIB, slab_bytes=SIZE, fresh_s=60, lease_s=60)
    put(store, [POOL_ID_KEY], [bytes(64)])
    blocks = fill_with_leased_blocks(store)
    markers = [BlockKey(f"pds1:ab:handoff:{i}:0:failed") for i in range(40)]
    for marker in markers:
        assert put(store, [marker], [bytes(64)]) == 1
        assert store.which_stored([marker]) == [True]
    assert store.which_stored(markers) == [False] * 25 + [True] * 15, "16 pages, the pool's id"
    assert store.match([POOL_ID_KEY, *blocks]) == 1 + len(blocks), "no block went"


def test_tails_and_markers_are_missing_after_their_time(open_arena):
    store = open_arena(size=MIB, handoff_ttl_s=1e-6)
    [block] = fresh_keys(1)
    tail, marker = BlockKey(f"{block}:partial:3"), BlockKey("pds1:ab:handoff:cd:0:done")
    for key in (block, tail, marker):
        put(store, [key], [content(key, 100)])
    assert store.which_stored([block, tail, marker]) == [True, False, False]


def test_a_put_wakes_whoever_waits_for_a_change(open_arena):
    store, [key], woken = open_arena(size=MIB), fresh_keys(1), threading.Event()
    peer = open_arena()
    seen = peer.wait_for_change(None, 0)
    assert peer.wait_for_change(seen, 0.001) == seen

    def wait():
        assert peer.wait_for_change(seen, 60) != seen
        assert peer.match([key]) == 1
        woken.set()

    run_together(wait, lambda: put(store, [key], [b"x"]), deadline_s=10)
    assert woken.is_set()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("shm://a/b", "dir="),
        ("shm://a:1", "dir="),
        ("shm://-a", "a name has"),
        ("shm://a?dir=/not/there", "is no directory"),
        ("shm://a?lease=4000", "lease must be"),
        ("shm://a?colour=red", "unknown option"),
        ("shm://a?size=900TiB", "free"),
        ("shm://a?size=1MiB&slab=1000", "slab"),
        ("shm://a?size=1KiB", "less than the smallest arena"),
    ],
)
def test_a_url_that_does_not_fit_says_why(url, words, tmp_path):
    if "dir=" not in url:
        url += f"{'&' if '?' in url else '?'}dir={tmp_path}"
    with pytest.raises(ConfigError, match=words):
        open_store(url, Settings(native="require"))


@pytest.mark.misconfiguration("one `shm://` name with two sizes")
def test_another_size_than_the_arena_has_is_refused(open_arena):
    open_arena(size=4 * MIB)
    assert len(open_arena(size=4 * MIB).memory()) == 4 * MIB
    with pytest.raises(ConfigError, match=r"is there already with size=\d+: use that, leave"):
        open_arena(size=8 * MIB)


@pytest.fixture
def huge_disk(tmp_path):
    """A tmpfs that gives huge pages."""
    disk = tmp_path / "huge"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=0700,huge=always", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs with huge pages can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def num_huge_pages_refused():
    """How many huge pages of files the kernel has not given, as no memory was whole enough."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["thp_file_fallback"])


def test_huge_pages_are_used_where_the_file_system_gives_them(library, huge_disk):
    before = num_huge_pages_refused()
    with contextlib.closing(ArenaStore(library, "pool", directory=huge_disk, size=64 * MIB)) as one:
        put(one, fresh_keys(8), [bytes(4 * MIB)] * 8)
        maps = Path("/proc/self/smaps").read_text().split("VmFlags")
        ours = [text for text in maps if f" {huge_disk}/" in text]
        sizes = [int(kb) for text in ours for kb in re.findall(r"ShmemPmdMapped: +(\d+)", text)]
        refused = num_huge_pages_refused() - before
        assert sum(sizes) * 1024 >= 16 * MIB - refused * 2 * MIB
