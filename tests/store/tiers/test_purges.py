"""A purge is not undone by copies under way, whichever process or host makes them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdstore.errors import StoreError
from pdstore.format.keys import HASH_BYTES
from pdstore.settings import Settings
from pdstore.store import open_store
from pdstore.store.arena.store import ArenaStore
from pdstore.store.file.store import FileStore
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import TellsRoom
from pdstore.store.tiers.lower import Limits
from pdstore.store.tiers.purges import (
    Purge,
    PurgeNumbers,
    PurgeWatch,
    Sample,
    namespaces_of,
)
from pdstore.store.tiers.store import TieredStore
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.faulty import Faulty
from pdstore.testing.values import contents, filled_slots, get, put
from tests.store.tiers.conftest import Counted, copies_of, held
from tests.support.child import child
from tests.support.kv import eventually, settings_of

ROOT = Path(__file__).parents[3]
SIZE = 4096
NAMESPACE = "5" * 32
TOKEN = bytes(HASH_BYTES)


def put_all(store, keys, version=0):
    assert put(store, keys, contents(keys, SIZE, version)) == len(keys)


def namespace_of(keys):
    [namespace] = namespaces_of(keys)
    return namespace


def problem_of(store):
    return store.optional(TellsRoom).room().problem


class AtPut(WrapperStore):
    """Does something before each put of blocks, and something else behind it."""

    def __init__(self, store, before=lambda: None, behind=lambda: None):
        super().__init__(store)
        self.before = before
        self.behind = behind

    def put(self, keys, slots):
        if ":purge:" in keys[0]:
            return super().put(keys, slots)
        self.before()
        num_done = super().put(keys, slots)
        self.behind()
        return num_done


def test_a_value_that_is_purged_and_stored_anew_during_its_copy_is_not_the_old_one_below(
    open_tiers, name, tmp_path
):
    """Another process of the host clears and saves again while this one copies."""
    files = tmp_path / "files"
    other = open_tiers(MemoryStore(f"memory://{name}"), FileStore(files))
    keys = fresh_keys(3)

    def purge():
        if not done:
            done.append(True)
            other.clear(namespace_of(keys))
            put_all(other.first, keys, version=1)

    done: list[bool] = []
    below = AtPut(FileStore(files), before=purge)
    store = open_tiers(MemoryStore(f"memory://{name}"), below)
    put_all(store, keys)
    assert store.flush()
    assert done
    assert below.match(keys) == 0
    assert copies_of(store)["lost"] == 3
    put_all(other, keys, version=1)
    assert other.flush()
    assert get(below, keys, [SIZE] * 3) == contents(keys, SIZE, 1)


def test_purges_during_copies_of_several_processes_leave_nothing_of_before(
    open_tiers, arena_of, tmp_path
):
    stacks = [open_tiers(arena_of(), FileStore(tmp_path / "files")) for _ in range(3)]
    for _ in range(15):
        keys = fresh_keys(24)
        parts = keys[:12], keys[12:]
        for each, part in zip(stacks[1:], parts, strict=True):
            put_all(each, part)
        stacks[0].clear(namespace_of(keys))
        for each, part in zip(stacks[1:], parts, strict=True):
            put_all(each, part, version=1)
        assert all(each.flush() for each in stacks)
        kept = [key for key in keys if stacks[0].tiers[1].match([key])]
        for each in stacks[0].tiers:
            there = [key for key in kept if each.match([key])]
            assert get(each, there, [SIZE] * len(there)) == contents(there, SIZE, 1)


STACKS = [
    "memory > file",
    "shm > file",
    pytest.param("shm > redis", marks=pytest.mark.redis),
    pytest.param("redis > file", marks=pytest.mark.redis),
]


@pytest.fixture(params=STACKS)
def hosts(request, open_tiers, library, tmp_path, name):
    """Two hosts with a first tier each over one lower tier; the second host's may be held."""
    first, lower = request.param.split(" > ")

    def first_of(host):
        if first == "redis" and host == "a":
            return open_store(request.getfixturevalue("redis_url"), Settings())
        if first == "shm":
            return ArenaStore(library, f"{name}-{host}", directory=tmp_path, size=64 << 20)
        return MemoryStore(f"memory://{name}-{host}")

    def lower_of():
        if lower == "redis":
            return open_store(request.getfixturevalue("redis_url"), Settings())
        return FileStore(tmp_path / "shared")

    gate = Faulty(lower_of())
    limits = [Limits(look_s=2.0)]
    ours = open_tiers(first_of("a"), lower_of(), limits=limits)
    theirs = open_tiers(first_of("b"), gate, limits=limits)
    return ours, theirs, gate


def test_two_hosts_purge_one_after_the_other(hosts):
    ours, theirs, gate = hosts
    keys = fresh_keys(6)
    namespace = namespace_of(keys)
    shared = ours.tiers[1]
    put_all(ours, keys[:3])
    put_all(theirs, keys[3:4])
    assert ours.flush()
    assert theirs.flush()
    assert shared.match(keys) == 4
    with held(gate):
        put_all(theirs, keys[4:])  # their copies wait
        ours.clear(namespace)
    assert theirs.flush()
    assert not any(shared.match([key]) for key in keys)
    assert copies_of(theirs)["copied"] == 1

    watch = theirs.lower[0].purges
    put_all(theirs, keys[:1])
    assert theirs.flush()
    assert sum(copies_of(theirs).get(each, 0) for each in ("given_up", "lost")) == 3
    assert watch.before_promotion(namespace) is None
    assert f"pdstore purge --namespace {namespace}" in problem_of(theirs)
    assert problem_of(ours) is None
    assert ours.lower[0].purges.before_promotion(namespace) == Sample(2, 2)

    theirs.clear(namespace)
    assert theirs.first.match(keys[3:]) == 0
    assert problem_of(theirs) is None
    eventually(lambda: watch.before_promotion(namespace) == Sample(2, 2), 5)
    for each, part in ((ours, keys[:3]), (theirs, keys[3:])):
        put_all(each, part, version=1)
        assert each.flush()
    assert get(shared, keys, [SIZE] * 6) == contents(keys, SIZE, 1)
    assert problem_of(ours) is None, "neither host has to purge again"


def test_a_copy_under_way_on_another_host_is_taken_back(open_tiers, tmp_path):
    keys = fresh_keys(3)
    ours = open_tiers(MemoryStore(), FileStore(tmp_path / "shared"))
    below = AtPut(FileStore(tmp_path / "shared"), before=lambda: ours.clear(namespace_of(keys)))
    theirs = open_tiers(MemoryStore(), below)
    put_all(theirs, keys)
    assert theirs.flush()
    assert below.match(keys) == 0
    assert theirs.match(keys) == 3, "that host has to be purged, too"


def test_a_promotion_beside_a_purge_may_not_stay(open_tiers, tmp_path):
    keys = fresh_keys(2)
    namespace = namespace_of(keys)
    first, lower = MemoryStore("memory://promoted"), FileStore(tmp_path / "files")
    store = open_tiers(first, lower)
    put_all(lower, keys)
    watch = store.lower[0].purges
    before = watch.before_promotion(namespace)
    assert before == Sample(0, 0)
    put_all(first, keys[:1])
    assert watch.may_keep(namespace, before)
    store.clear(namespace)
    put_all(first, keys)  # what was read before
    assert not watch.may_keep(namespace, before)


def test_while_a_purge_is_under_way_or_was_broken_off_nothing_is_copied(open_tiers):
    first, lower = MemoryStore(), MemoryStore()
    store, keys = open_tiers(first, lower), fresh_keys(3)
    namespace = namespace_of(keys)
    assert Purge(namespace, PurgeNumbers(first), [PurgeNumbers(lower)]).begin() == []
    put_all(store, keys)
    assert store.flush()
    assert lower.match(keys) == 0
    assert store.lower[0].purges.before_promotion(namespace) is None
    assert "broken off" in problem_of(store)
    store.clear(namespace)
    assert problem_of(store) is None
    put_all(store, keys)
    assert store.flush()
    assert lower.match(keys) == 3


def test_promotions_read_the_numbers_at_most_once_in_a_second():
    first, lower = Counted(MemoryStore()), Counted(MemoryStore())
    watch = PurgeWatch(first, lower)
    for _ in range(500):
        assert watch.before_promotion(NAMESPACE) == Sample(0, 0)
    assert max(first.num_matches, lower.num_matches) <= 4


def test_a_batch_of_copies_costs_two_searches_of_each_tier(open_tiers):
    first, lower = Counted(MemoryStore()), Counted(MemoryStore())
    store, keys = open_tiers(first, lower), fresh_keys(40)
    put_all(store, keys[:20])
    assert store.flush()
    first.num_matches = lower.num_matches = 0
    put_all(store, keys[20:])
    assert store.flush()
    assert (first.num_matches, lower.num_matches) == (2, 2)


def test_a_new_first_tier_takes_the_number_over_and_an_old_one_does_not(open_tiers, tmp_path):
    """After a restart of its host, an arena has lost its numbers, and all else that it had."""
    keys = fresh_keys(4)
    namespace = namespace_of(keys)
    store = open_tiers(MemoryStore(), FileStore(tmp_path / "files"))
    store.clear(namespace)
    put_all(store, keys[:1])
    assert store.flush()
    old = MemoryStore()
    put_all(old, keys[3:])
    for first, num_copied in ((MemoryStore(), 2), (old, 0)):
        again = open_tiers(first, FileStore(tmp_path / "files"))
        put_all(again, keys[1:3])
        assert again.flush()
        assert copies_of(again).get("copied", 0) == num_copied
        assert (problem_of(again) is None) == bool(num_copied)
        again.tiers[1].remove(keys[1:3])


def test_two_lower_tiers_of_which_one_is_new_go_on(open_tiers, tmp_path):
    keys = fresh_keys(2)
    first, middle = MemoryStore(), MemoryStore()
    PurgeNumbers(last := FileStore(tmp_path / "files")).put(namespace_of(keys), 2, TOKEN)
    store = open_tiers(first, middle, last)
    put_all(store, keys)
    assert store.flush()
    assert middle.match(keys) == last.match(keys) == 2


def test_a_tier_that_has_missed_a_purge_is_cleared_before_the_next_copy(open_tiers):
    first, inner = MemoryStore(), MemoryStore()
    below = Faulty(inner)
    store = open_tiers(first, below, limits=[Limits(look_s=0.02)])
    [*keys, late] = fresh_keys(4)
    namespace = namespace_of(keys)
    put_all(store, keys)
    assert store.flush()
    with held(below), pytest.raises(StoreError, match="purge again when it answers"):
        store.clear(namespace)
    assert PurgeNumbers(first).last(namespace) == 2
    assert inner.match(keys) == 3
    eventually(lambda: not store.lower[0].is_out, 10)
    assert store.lower[0].purges.before_promotion(namespace) is None
    put_all(store, [late])
    assert store.flush()
    assert inner.which_stored([*keys, late]) == [False] * 3 + [True]
    assert store.lower[0].purges.sample(namespace) == Sample(2, 2)


def test_what_a_tier_has_kept_that_missed_a_purge_is_copied_anew(open_tiers):
    """The same prompts are saved after the purge, and the tier seems to have them already."""
    first, below, keys = MemoryStore(), MemoryStore(), fresh_keys(3)
    store = open_tiers(first, below)
    put_all(below, keys)
    assert PurgeNumbers(first).put(namespace_of(keys), 2, TOKEN)
    put_all(store, keys, version=1)
    assert store.flush()
    assert get(below, keys, [SIZE] * 3) == contents(keys, SIZE, 1)
    assert copies_of(store) == {"copied": 3}


def test_a_purge_on_a_host_that_is_new_is_noticed_on_others(open_tiers, tmp_path):
    keys = fresh_keys(3)
    namespace = namespace_of(keys)

    def purge():
        new = open_tiers(MemoryStore(), FileStore(tmp_path / "shared"))
        new.clear(namespace)

    below = AtPut(FileStore(tmp_path / "shared"))
    theirs = open_tiers(MemoryStore(), below)
    theirs.clear(namespace)
    below.before = purge
    put_all(theirs, keys)
    assert theirs.flush()
    assert below.match(keys) == 0
    assert theirs.lower[0].purges.sample(namespace) == Sample(2, 4)


def test_numbers_survive_a_restart_and_a_clear(open_tiers, tmp_path):
    keys = fresh_keys(2)
    namespace = namespace_of(keys)
    for number in (2, 4):
        stores = FileStore(tmp_path / "first"), FileStore(tmp_path / "below")
        with contextlib.closing(TieredStore(stores, num_right=len, late_s=0.0)) as store:
            put_all(store, keys)
            assert store.flush()
            store.clear(namespace)
            assert store.match(keys) == 0
            assert [PurgeNumbers(each).last(namespace) for each in stores] == [number] * 2


def copy_in_another_process(directory: Path, name: str, keys: list[str], *, is_killed: bool):
    """Copies values; waits for a line before it puts them into the lower tier."""

    def before() -> None:
        print("read", flush=True)
        sys.stdin.readline()

    def behind() -> None:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)

    from pdstore.native.library import load_library

    library = load_library(settings_of(native="require"), for_gpu=False)
    first = ArenaStore(library, name, directory=directory, size=64 << 20)
    lower = AtPut(FileStore(directory / "files"), before, behind)
    with contextlib.closing(TieredStore([first, lower], num_right=len)) as store:
        store.put(keys, filled_slots([content(key, SIZE) for key in keys]))
        store.flush()
        print("ended", flush=True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_purge_during_the_copy_of_another_process(
    open_tiers, library, tmp_path, name, closed_after, *, is_killed
):
    """The other process is killed between its copy and its second look, or lives on."""
    keys = fresh_keys(3)
    namespace = namespace_of(keys)
    arena = ArenaStore(library, name, directory=tmp_path, size=64 << 20)
    files = closed_after(FileStore(tmp_path / "files"))
    store = open_tiers(arena, FileStore(tmp_path / "files"), late_s=1.5)
    clearing = threading.Thread(target=store.clear, args=(namespace,))
    script = (
        "from pathlib import Path; from tests.store.tiers import test_purges as t;"
        f" t.copy_in_another_process(Path({str(tmp_path)!r}), {name!r}, {keys!r},"
        f" is_killed={is_killed})"
    )
    with child(
        [sys.executable, "-c", script],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == "read\n"
        clearing.start()
        eventually(lambda: PurgeNumbers(files).last(namespace) == 1, 10)
        if not is_killed:
            clearing.join(30)  # so its copy comes much too late
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == ("" if is_killed else "ended\n")
        assert process.wait(30) == (-signal.SIGKILL if is_killed else 0)
        assert is_killed == bool(files.match(keys)), "the purge has not cleared it yet"
    clearing.join(30)
    assert files.match(keys) == arena.match(keys) == 0
    assert store.lower[0].purges.sample(namespace) == Sample(2, 2)
